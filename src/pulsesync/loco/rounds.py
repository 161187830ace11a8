"""What DiLoCo, PULSELoCo and DDP have in common: the hooks, and rounds as transactions of fragments."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from pulsesync.core.events import RoundCompleted, RoundFailed, describe_error, emit, has_listeners
from pulsesync.errors import MissingLinkError, StateError, StoreError
from pulsesync.loco import checkpoint
from pulsesync.loco.commit import Rejoiner, RoundCommitter
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.fragments import (
    Fragment,
    Place,
    check_covered,
    fragments_of,
    in_own_streams,
    named_tensors,
    place_of,
)
from pulsesync.loco.gate import GateRule
from pulsesync.loco.outer_step import OuterRule
from pulsesync.loco.round_exchange import ExchangedRound, RoundExchange
from pulsesync.loco.vectors import Vector

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundReport:
    """The result of a round, for this trainer."""

    fragment: int
    round: int  # of its weights now
    took_part: bool  # False: the round does not contain its update, which is kept, or dropped if it has diverged
    members: tuple[str, ...]  # none: the round was empty, because its updates or its result were too large
    sent: int  # entries that it sent ...
    total: int  # ... of this many
    moved: int  # entries in which the mean of all updates is not zero
    sent_bytes: int  # in total
    received_bytes: int
    digest: str  # of the shared state after it
    seconds: float


class FragmentTrainer:
    """What all three have in common: fragments, hooks, the exchange, and rounds."""

    _rejoiner_class = Rejoiner

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        exchange: Exchange,
        gate: GateRule,
        rule: OuterRule,
        about: str,
        on_round: Callable[[RoundReport], None] | None,
    ) -> None:
        tensors = fragments_of(model)
        check_covered(inner_optimizer, tensors)
        self._model, self._inner, self._on_round = model, inner_optimizer, on_round
        self.last_report: RoundReport | None = None
        self._fragments = [Fragment.of(index, these, rule) for index, these in enumerate(tensors)]
        self._round_exchange = RoundExchange(exchange, gate)
        self._committer = RoundCommitter(self._fragments)
        self._rejoiner = self._rejoiner_class(self._round_exchange, self._committer, about)
        self._begun = False  # until then, weights that are loaded into the model are the start
        self._hook: Any = None

    @property
    def exchange(self) -> Exchange:
        """Connects this trainer with the others."""
        return self._round_exchange.exchange

    @property
    def rounds(self) -> list[int]:
        """The number of rounds of each fragment."""
        return [fragment.shared.round for fragment in self._fragments]

    @property
    def digests(self) -> list[str]:
        """Of each fragment's shared state: equal on all trainers after every round."""
        with in_own_streams(self._fragments):
            return [fragment.shared.digest for fragment in self._fragments]

    def shared_weights(self, model: Any = None) -> dict[str, Any]:
        """The weights that all trainers share, by name: publish, evaluate and roll out these.

        A trainer's own model also contains updates that it has not sent yet, which differ between trainers. The tensors
        are FP32 and on the device where the fragment's parameters are, and separate from the model; do not write to
        them. The next round replaces them.

        Args:
            model: A module, or a mapping of names to tensors, whose names and buffers are used; if not given, the model
                of the constructor. Its tensors that no fragment trains are returned as they are.

        Raises:
            StateError: several fragments use the same name; pass the whole model. Or the given model does not have all
                trained tensors.
        """
        self._prepare()
        known: dict[Place | None, Any] = {}
        for fragment in self._fragments:
            known.update(fragment.tensors.views(self._shared_values(fragment)))
        named = named_tensors(self._model if model is None else model)
        if missing := known.keys() - {place_of(tensor) for tensor in named.values()}:
            raise StateError(
                f"expected a model with all {len(known)} tensors that are trained, but found one without "
                f"{len(missing)} of them: pass the module whose parameters are trained, or None for master weights"
            )
        return {
            name: known.get(place_of(value), value.detach() if hasattr(value, "detach") else value)
            for name, value in named.items()
        }

    def _prepare(self) -> None:
        """Complete unfinished commits. Before the first round, use the current weights of the model as the start."""
        self._committer.complete_pending()
        if not self._begun:
            with in_own_streams(self._fragments):
                for fragment in self._fragments:  # their own vectors are zero
                    fragment.shared = replace(fragment.shared, theta=fragment.tensors.read())

    def _shared_values(self, fragment: Fragment) -> Vector:
        return fragment.shared.theta

    def __enter__(self) -> Any:
        if self._hook is not None:
            raise RuntimeError("this context was already entered; make a new trainer to enter again")
        self.rejoin()
        self._hook = self._register()
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            with suppress(StoreError):  # the others notice after their deadline
                self.exchange.leave(self.rounds)

    def _register(self) -> Any:
        return self._inner.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        raise NotImplementedError

    def rejoin(self, exchange: Exchange | None = None) -> None:
        """Join the other trainers, over another exchange if one is given: at the start, and after a failure.

        Shared state is taken from the trainer with the most rounds; residual and momentum are kept. If a round that
        failed for this trainer was completed by others, the payload's id identifies the update that it contains.
        """
        self._prepare()
        self._begun = True
        self._round_exchange.exchange = exchange or self.exchange
        with in_own_streams(self._fragments):
            self._rejoiner.rejoin()

    def discard(self) -> None:
        """Roll the weights back to the beginning of the round, for example after an update that is not finite."""
        self._prepare()
        for fragment in self._fragments:
            fragment.pending.attempts = 0  # discarded steps are not sent again
            fragment.unwritten = fragment.start()
        self._committer.finish(self._committer.complete_pending)

    def _report(self, fragment: Fragment, done: ExchangedRound, began: float) -> None:
        members, shared = done.result.members, fragment.shared  # for a late trainer, newer than the round
        self.last_report = RoundReport(
            fragment.index,
            shared.round,
            self.exchange.trainer in members,
            tuple(members),
            len(done.part.sent.positions),
            done.part.sent.size,
            done.result.moved,
            done.sent_bytes,
            done.received_bytes,
            shared.digest,
            perf_counter() - began,
        )
        _log_round(self.last_report)
        if self._on_round is not None:
            self._on_round(self.last_report)

    def state_dict(self) -> dict[str, Any]:
        """Everything to resume from, as tensors and numbers: `shared`, which may be given to a peer, and `private`.

        The tensors are in host memory.
        """
        self._prepare()
        with in_own_streams(self._fragments):
            return checkpoint.save(self._fragments, self.exchange.trainer)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the model's weights are set to those in it.

        Its tensors may be in host memory or on a device, independent of this trainer's parameters.

        Without `private`, or with that of another trainer, they are the shared ones; residual and momentum are zero.

        Raises:
            StateError: it is of another model, has other fragments, or was saved by another kind of trainer.
        """
        with in_own_streams(self._fragments):
            trainer = self.exchange.trainer
            self._fragments[:] = checkpoint.load(state, self._fragments, trainer, type(self).__name__)
        self._rejoiner.known_as = (state.get("private") or {}).get("trainer", trainer)
        self._begun = True
        self._committer.complete_pending()


def _log_round(report: RoundReport) -> None:
    """Log and emit a round that is complete."""
    logger.info(
        "Round %d of fragment %d is complete with %d trainers%s: %d of %d entries and %d bytes sent, %d received, "
        "%.2f s.",
        report.round,
        report.fragment,
        len(report.members),
        "" if report.took_part else ", without this one",
        report.sent,
        report.total,
        report.sent_bytes,
        report.received_bytes,
        report.seconds,
    )
    if has_listeners():
        emit(RoundCompleted.of(report, members=len(report.members)))


@contextmanager
def noting_failure(fragment: Fragment) -> Iterator[None]:
    """Emit that the next round failed, if it does inside; not if the trainer must rejoin. The caller has the error."""
    round_ = fragment.shared.round + 1
    try:
        yield
    except MissingLinkError:
        raise
    except Exception as e:
        if has_listeners():
            emit(RoundFailed(fragment=fragment.index, round=round_, error=describe_error(e)))
        raise
