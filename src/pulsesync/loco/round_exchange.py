"""One round of one fragment: what this trainer sends, and what the round results in. Commits nothing."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from pulsesync.errors import StateError
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.fragments import Fragment, in_own_streams
from pulsesync.loco.gate import GateRule, SentUpdate, SparseVector, Update
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, RoundResult, SharedState

logger = logging.getLogger(__name__)

LARGEST_FINITE = np.finfo(np.float32).max


@dataclass(frozen=True, eq=False)
class ExchangedRound:
    """A round that was exchanged and computed, but is not committed yet."""

    part: SentUpdate  # what this trainer has sent
    result: RoundResult
    taken: SparseVector | None  # the update of a trainer with this name in the round, if the exchange has it
    sent_bytes: int
    received_bytes: int


@dataclass(eq=False, repr=False)
class RoundExchange:
    """Sends updates through an exchange, and computes the rounds that result. Changes only the pending updates."""

    exchange: Exchange
    gate: GateRule

    def coder(self, fragment: Fragment, shared: SharedState) -> Coder:
        """The coder of the round after a shared state."""
        described = None if self.gate.dense else describe(shared.theta, shared.trend)
        return Coder(fragment.index, shared.round + 1, shared.digest, described, fragment.tensors.vectors)

    @contextmanager
    def _declining(self, fragment: Fragment, shared: SharedState) -> Iterator[None]:
        """If the code inside fails, announce that this trainer has no update, so that the others do not wait."""
        try:
            yield
        except Exception as e:
            self._decline(fragment, shared, f"{type(e).__name__}: {e}")
            raise

    def _decline(self, fragment: Fragment, shared: SharedState, why: str) -> None:
        coder = Coder(fragment.index, shared.round + 1, shared.digest, None, fragment.tensors.vectors)
        self.exchange.decline(coder, len(shared.theta), why)

    def select(self, fragment: Fragment, update: Update) -> SentUpdate:
        """The part of an update to send. Raises: StateError, after notifying the others, if it is not finite."""
        shared = fragment.shared
        with in_own_streams([fragment]):
            with self._declining(fragment, shared):
                fragment.tensors.check_place()
                part = self.gate.select(shared.theta, update)
            if np.isfinite(part.largest):
                return part
            name = fragment.tensors.name_of(fragment.first_beyond(update, LARGEST_FINITE) or 0)
            self._decline(fragment, shared, f"an update of {name} is not finite")
        raise StateError(
            f"the update of {name!r} is not finite, so nothing was sent. Call discard() to return to the weights "
            "at the beginning of the round",
            tensor=name,
        )

    def run(self, fragment: Fragment, shared: SharedState, part: SentUpdate) -> ExchangedRound:
        """Exchange this part of an update, and compute the round after a shared state."""
        exchange = self.exchange
        sent, received = exchange.sent_bytes, exchange.received_bytes
        with in_own_streams([fragment]):
            with self._declining(fragment, shared):
                coder = self.coder(fragment, shared)
                part = fragment.pending.choose(part)
                encoded = exchange.prepare(coder, part)
            fragment.pending.add(encoded.id, part)
            decided = exchange.propose(coder, encoded, len(shared.theta))
            coder = replace(coder, described=None)  # frees 2 bytes a weight
            result = _resolve(fragment, shared, decided)
            exchange.confirm(coder, decided, result.after)
        passed = exchange.sent_bytes - sent, exchange.received_bytes - received
        return ExchangedRound(part, result, decided.taken, *passed)

    def missed(self, fragment: Fragment) -> tuple[SparseVector | None, RoundResult] | None:
        """The next round, if it was decided without this trainer: the update under its name in it, and the result."""
        shared = fragment.shared
        decided = self.exchange.missed(self.coder(fragment, shared), len(shared.theta))
        return None if decided is None else (decided.taken, _resolve(fragment, shared, decided))


def _resolve(fragment: Fragment, shared: SharedState, decided: Outcome) -> RoundResult:
    result = shared.resolve(decided, fragment.rule)
    if not result.members:
        trend = "stays" if result.after.trend is shared.trend else "is reset to zero"
        logger.warning(
            "Round %d of fragment %d is empty for all trainers: the updates of %s yield values that are too "
            "large. The shared weights are unchanged; the shared momentum or trend %s.",
            result.after.round,
            fragment.index,
            ", ".join(decided.members),
            trend,
        )
    return result
