"""What DiLoCo, PULSELoCo and DDP have in common: fragments, hooks, the exchange, and rounds as transactions."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from pulsesync.core.threads import finish
from pulsesync.errors import MissingLinkError, StateError, StoreError
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.fragments import FragmentTensors, check_covered, fragments_of
from pulsesync.loco.gate import F32, GateRule, SparseVector, SplitUpdate, update
from pulsesync.loco.outer import SGD
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import LARGEST_UPDATE, Outcome, SharedState, diverges, read_part

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for this trainer."""

    fragment: int
    round: int  # that its weights are at now
    took_part: bool  # False: the round did not take its update, which was kept, or dropped if it had diverged
    members: tuple[str, ...]  # none: the round was empty, because its updates or its result were too large
    sent: int  # entries that it sent ...
    total: int  # ... of so many
    moved: int  # entries in which the sum of all is not zero
    sent_bytes: int  # everything counted
    received_bytes: int
    digest: str  # of the shared state it led to
    seconds: float


@dataclass(frozen=True, eq=False)
class FragmentState:
    """A fragment's state: shared, and private. Replaced whole, so that both change at once."""

    shared: SharedState
    residual: F32


@dataclass(frozen=True, eq=False)
class Proposal:
    """An update that is offered, and the state it was made on."""

    shared: SharedState
    split: SplitUpdate


@dataclass(frozen=True, eq=False)
class ExchangedRound:
    """A round that was exchanged and computed, and not committed yet."""

    proposal: Proposal
    outcome: Outcome
    after: SharedState
    sent_bytes: int
    received_bytes: int


def _begin(tensors: FragmentTensors) -> FragmentState:
    """The state of a fragment in which nothing has been learned yet."""
    zeros = np.zeros(tensors.size, np.float32)
    return FragmentState(SharedState(tensors.layout, tensors.read(), zeros), zeros)


class FragmentTrainer:
    """What all three have in common: fragments, hooks, the exchange, and rounds."""

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        outer: SGD,
        exchange: Exchange,
        rule: GateRule,
        about: str,
        on_round: Callable[[RoundReport], None] | None,
    ) -> None:
        if not isinstance(outer, SGD):
            raise TypeError(f"outer is pulsesync.loco.Nesterov(lr, momentum) or SGD(lr), not {type(outer).__name__}")
        self._tensors = fragments_of(model)
        check_covered(inner_optimizer, self._tensors)
        self._inner, self._outer, self._rule, self._about = inner_optimizer, outer, rule, about
        self._on_round = on_round
        self.exchange = exchange
        self.last_report: RoundReport | None = None
        self._held = [_begin(t) for t in self._tensors]
        self._begun = False  # until then weights that are loaded into the model are where it begins
        # By fragment and payload: what was sent since its last round, and may have been taken without our hearing of it
        self._pending: list[dict[str, SparseVector]] = [{} for _ in self._tensors]
        self._known_as = exchange.trainer  # where it last took part: ranks change with their group
        self._unwritten: dict[int, F32] = {}  # weights that could not be written when their round was committed
        self._hook: Any = None

    @property
    def rounds(self) -> list[int]:
        """Rounds that led to each fragment's state."""
        return [held.shared.round for held in self._held]

    @property
    def digests(self) -> list[str]:
        """Of each fragment's shared state: equal on all trainers after every round."""
        return [held.shared.digest for held in self._held]

    def __enter__(self) -> Any:
        if self._hook is not None:
            raise RuntimeError("this context is entered already")
        self.rejoin()
        self._hook = self._register()
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            with suppress(StoreError):  # the others find out, after their deadline
                self.exchange.leave(self.rounds)

    def _register(self) -> Any:
        return self._inner.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        raise NotImplementedError

    def rejoin(self, exchange: Exchange | None = None) -> None:
        """Come together with the others, over another exchange if one is given: at the start, and after a failure.

        Shared state is taken from whoever has come furthest; the residual stays this trainer's own. If a round that
        failed here was completed by others, what it took of this trainer's update is known by the payload's id.
        """
        self._mend()
        if not self._begun:
            self._held, self._begun = [_begin(t) for t in self._tensors], True
        self.exchange = exchange or self.exchange
        found = self.exchange.join([held.shared for held in self._held], self._about)
        for fragment, shared in enumerate(found):
            self._adopt(fragment, shared)
            try:
                self._catch_up(fragment)
            except MissingLinkError:  # a round cannot be followed: the exchange has a later state, or says what to do
                self.rejoin()
                return
        self._known_as = self.exchange.trainer

    def discard(self) -> None:
        """Put the weights back to the shared ones: for one whose steps came to nothing, or to what is no number."""
        self._unwritten = {fragment: held.shared.theta for fragment, held in enumerate(self._held)}
        finish(self._mend)

    def _adopt(self, fragment: int, shared: SharedState) -> None:
        """Go on from a shared state that others came to."""
        held = self._held[fragment]
        if shared.digest == held.shared.digest:
            self._held[fragment] = replace(held, shared=shared)
            return
        since = {part.payload for part in shared.parts.values() if part.round > held.shared.round}
        mine = shared.parts.get(self._known_as)
        residual = self._update(fragment, held)
        if taken := since & self._pending[fragment].keys():
            self._pending[fragment][taken.pop()].take_from(residual)
        elif mine is not None and mine.round > held.shared.round:
            residual[:] = 0  # a payload that this trainer does not remember: what it left of the residual is not known
        else:
            self._drop_diverged(fragment, residual)
        self._set(fragment, FragmentState(shared, residual), shared.theta)

    def _catch_up(self, fragment: int) -> None:
        """Take part, as a listener, in rounds that were decided without this trainer."""
        while True:
            held = self._held[fragment]
            outcome = self.exchange.missed(self._coder(fragment, held.shared), held.shared.theta.size)
            if outcome is None:
                return
            outcome, after = self._resolve(fragment, held.shared, outcome)
            s = self._update(fragment, held)
            if self.exchange.trainer not in outcome.members:
                self._drop_diverged(fragment, s)
            residual = self._left(fragment, s, outcome, offered=False)
            self._set(fragment, FragmentState(after, residual), after.theta)

    def _update(self, fragment: int, held: FragmentState) -> F32:
        return update(held.shared.theta, self._tensors[fragment].read(), held.residual)

    def _coder(self, fragment: int, shared: SharedState) -> Coder:
        described = None if self._rule.dense else describe(shared.theta, shared.momentum)
        return Coder(fragment, shared.round + 1, shared.digest, described)

    def _propose(self, fragment: int, s: F32) -> Proposal:
        held = self._held[fragment]
        if not np.isfinite(s).all():
            name = self._tensors[fragment].name_of(int(np.flatnonzero(~np.isfinite(s))[0]))
            self.exchange.decline(self._coder(fragment, held.shared), s.size, f"an update of {name} is not finite")
            raise StateError(
                f"the update of {name!r} is not finite: nothing is sent. `discard()` goes back to the shared weights",
                tensor=name,
            )
        return Proposal(held.shared, self._rule.split(held.shared.theta, s))

    def _meet(self, fragment: int, proposal: Proposal) -> ExchangedRound:
        """Exchange and compute; changes nothing but what is pending."""
        shared, split, exchange = proposal.shared, proposal.split, self.exchange
        sent, received = exchange.sent_bytes, exchange.received_bytes
        coder = self._coder(fragment, shared)
        letter = exchange.prepare(coder, split)
        self._pending[fragment][letter.id] = split.sent
        decided = exchange.propose(coder, letter, split.s.size)
        outcome, after = self._resolve(fragment, shared, decided)
        exchange.confirm(coder, decided, after)
        return ExchangedRound(proposal, outcome, after, exchange.sent_bytes - sent, exchange.received_bytes - received)

    def _resolve(self, fragment: int, shared: SharedState, decided: Outcome) -> tuple[Outcome, SharedState]:
        outcome, after = shared.resolve(decided, self._outer)
        if not outcome.members:
            momentum = "does, too" if after.momentum is shared.momentum else "is reset to zero"
            logger.warning(
                "Round %d of fragment %d is empty for all trainers: the updates of %s, with the momentum so far, lead "
                "to values that are too large. The shared weights stay as they were; the shared momentum %s.",
                after.round,
                fragment,
                ", ".join(decided.members),
                momentum,
            )
        return outcome, after

    def _left(self, fragment: int, s: F32, outcome: Outcome, offered: bool) -> F32:
        """What a round that was decided leaves of an update, which is written over.

        If it took what this trainer sent, that is subtracted; so is what an earlier life of it had sent, if this one
        offered an update for the same round (offered), as both had the same residual in them. If it only hears of the
        round, those entries are cleared: they were told, and to subtract them would undo what that life has done.
        """
        payload = outcome.members.get(self.exchange.trainer)
        taken = self._pending[fragment].get(payload or "", outcome.taken)
        if taken is None:
            return s
        if offered or payload in self._pending[fragment]:
            taken.take_from(s)
        else:
            s[taken.positions] = 0
        return s

    def _drop_diverged(self, fragment: int, s: F32) -> bool:
        """Clear an update that was not taken, if it diverges; return whether it did.

        Kept in the residual, it would be offered again and make every round empty.
        """
        if not diverges(s):
            return False
        at = int(np.abs(s).argmax())
        logger.error(
            "Trainer %s has diverged: its update of %r has a value of %g, and at most %g is accepted. No round took "
            "the update, so it is dropped; this trainer resumes from the shared weights.",
            self.exchange.trainer,
            self._tensors[fragment].name_of(at),
            s[at],
            LARGEST_UPDATE,
        )
        s[:] = 0
        return True

    def _set(self, fragment: int, held: FragmentState, weights: F32) -> None:
        """Replace a fragment's state and weights, whatever interrupts."""

        def work() -> None:
            self._held[fragment], self._pending[fragment], self._unwritten[fragment] = held, {}, weights
            self._mend()

        finish(work)

    def _mend(self) -> None:
        """Write the weights of committed rounds. If that fails (a device may), it is done at the next occasion."""
        for fragment in list(self._unwritten):
            self._tensors[fragment].write(self._unwritten[fragment])
            del self._unwritten[fragment]

    def _report(self, fragment: int, met: ExchangedRound, began: float) -> None:
        outcome, shared = met.outcome, self._held[fragment].shared  # of one that was late, further than the round
        self.last_report = RoundReport(
            fragment,
            shared.round,
            self.exchange.trainer in outcome.members,
            tuple(outcome.members),
            met.proposal.split.sent.positions.size,
            met.proposal.split.s.size,
            int(np.count_nonzero(outcome.total)),
            met.sent_bytes,
            met.received_bytes,
            shared.digest,
            perf_counter() - began,
        )
        if self._on_round is not None:
            self._on_round(self.last_report)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, as tensors and numbers: `shared`, which a peer may be given, and `private`."""
        import torch

        self._mend()

        def tensor(values: F32) -> Any:
            return torch.from_numpy(values.copy())

        shared = [
            {
                "layout": h.shared.layout,
                "round": h.shared.round,
                "theta": tensor(h.shared.theta),
                "momentum": tensor(h.shared.momentum),
                "parts": {k: list(v) for k, v in h.shared.parts.items()},
            }
            for h in self._held
        ]
        private = {
            "trainer": self.exchange.trainer,
            "residuals": [tensor(h.residual) for h in self._held],
            "weights": [tensor(t.read()) for t in self._tensors],
        }
        return {"shared": shared, "private": private}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the model's weights are set to those it had then.

        Without `private`, or with that of another trainer, they are the shared ones and the residual is zero.

        Raises:
            StateError: it is of another model, or has other fragments.
        """
        if [s["layout"] for s in state["shared"]] != [t.layout for t in self._tensors]:
            raise StateError("the saved state is of another model, or of other fragments")
        private = state.get("private") or {}
        own = private.get("trainer") == self.exchange.trainer
        read, weights = [], []
        for i, (tensors, saved) in enumerate(zip(self._tensors, state["shared"], strict=True)):
            parts = {name: read_part(part) for name, part in saved["parts"].items()}
            theta, momentum = tensors.vector(saved["theta"]), tensors.vector(saved["momentum"])
            shared = SharedState(saved["layout"], theta, momentum, int(saved["round"]), parts)
            zeros = np.zeros(tensors.size, np.float32)
            read.append(FragmentState(shared, tensors.vector(private["residuals"][i]) if own else zeros))
            weights.append(tensors.vector(private["weights"][i]) if own else theta)
        self._held, self._pending = read, [{} for _ in read]
        self._unwritten = dict(enumerate(weights))
        self._mend()
        self._known_as = private.get("trainer", self.exchange.trainer)
        self._begun = True
