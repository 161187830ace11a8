"""Training in several places that meet every so often: DiLoCo, PULSELoCo, and averaging of gradients at every step.

All three are contexts on the inner optimizer's hooks and take the same arguments: a comparison changes one word.

    with PulseLoCo(model, optimizer, outer=Nesterov(0.7, 0.9), sync_every=8, exchange=GroupExchange()):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()  # every eighth of these meets the others
            optimizer.zero_grad()

A round is a transaction: shared weights, momentum and residual change together, after everything was exchanged, checked
and computed. An exception out of `optimizer.step()` leaves them as they were, and the next step tries again.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np

from pulsesync.core.threads import finish
from pulsesync.errors import MissingLinkError, StateError
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.gate import DenseGate, GateRule, VisibilityGate
from pulsesync.loco.meeting import ExchangedRound, FragmentState, FragmentTrainer, RoundReport
from pulsesync.loco.outer import SGD, Nesterov, mean_of
from pulsesync.loco.shared import LARGEST_UPDATE, Outcome, SharedState, diverges

logger = logging.getLogger(__name__)

EXIT_S = 60.0  # that a context waits, when it ends, for a round that is on its way


class _BackgroundRound:
    """A round that is exchanged behind training. A daemon: nobody need wait for it to end the process."""

    def __init__(self, fragment: int, began: float, work: Callable[[], ExchangedRound]) -> None:
        self.fragment, self.began = fragment, began
        self._future: Future[ExchangedRound | BaseException] = Future()
        threading.Thread(target=self._run, args=(work,), name="pulse-loco", daemon=True).start()

    def _run(self, work: Callable[[], ExchangedRound]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - raised where it is waited for
            self._future.set_result(e)

    def wait(self, timeout_s: float | None) -> ExchangedRound | BaseException:
        """What came of it; an exception too is returned, to tell it from one of the waiting. Raises: TimeoutError."""
        return self._future.result(timeout_s)


class _PeriodicTrainer(FragmentTrainer):
    """Trainers that meet every so many steps: what DiLoCo and PULSELoCo have in common is all but the rule."""

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        exchange: Exchange,
        outer: SGD | None,
        sync_every: int,
        delay: int,
        blend: float,
        on_round: Callable[[RoundReport], None] | None,
        rule: GateRule,
    ) -> None:
        outer = outer or Nesterov()
        about = f"{type(self).__name__} {outer} {rule} sync_every={sync_every} delay={delay} blend={float(blend)}"
        super().__init__(model, inner_optimizer, outer, exchange, rule, about, on_round)
        count = len(self._tensors)
        if sync_every < 1 or sync_every % count or not 0 <= delay < sync_every // count or not 0 <= blend <= 1:
            raise ValueError(
                f"sync_every={sync_every} must be a multiple of the {count} fragments, delay={delay} below the steps "
                f"between two turns, blend={blend} from 0 to 1"
            )
        self._period, self._delay, self._blend = sync_every // count, delay, np.float32(blend)
        self._steps = 0  # since the last round of any fragment
        self._flying: _BackgroundRound | None = None

    @property
    def _turn(self) -> int:
        """The fragment that is next: the first of those that have had the fewest rounds, so that all agree on it."""
        return self.rounds.index(min(self.rounds))

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            if kind is None:
                self._ground()  # the others, at the same step, wait for it too; or they have left
        finally:
            self._flying = None
            super().__exit__()

    def rejoin(self, exchange: Exchange | None = None) -> None:
        with suppress(Exception):  # whatever became of a round on its way: its payload is pending
            self._ground()
        self._flying = None
        super().rejoin(exchange)

    def _ground(self) -> None:
        """Wait a while for a round that is on its way, and commit it."""
        with suppress(TimeoutError):
            if self._flying is not None:
                self._land(EXIT_S)

    def _after_step(self) -> None:
        self._mend()
        self._steps += 1
        try:
            if self._flying is None and self._steps >= self._period - self._delay:
                fragment, began = self._turn, perf_counter()
                proposal = self._propose(fragment, self._update(fragment, self._held[fragment]))
                if not self._delay:
                    self._commit(fragment, self._meet(fragment, proposal), began)
                    return
                self._flying = _BackgroundRound(fragment, began, lambda: self._meet(fragment, proposal))
            if self._flying is not None and self._steps >= self._period:
                self._land()
        except MissingLinkError:  # away for so long that the rounds since are gone: only a state leads on
            self.rejoin()

    def _land(self, timeout_s: float | None = None) -> None:
        assert self._flying is not None
        flight = self._flying
        met = flight.wait(timeout_s)  # interrupted, it is still on its way
        if isinstance(met, BaseException):
            self._flying = None
            raise met
        self._commit(flight.fragment, met, flight.began)

    def _commit(self, fragment: int, met: ExchangedRound, began: float) -> None:
        """Change everything at once, whatever interrupts. After a failure before this the next step tries again."""

        def work() -> None:
            weights, s = met.after.theta, met.proposal.split.s
            took_part = self.exchange.trainer in met.outcome.members
            dropped = not took_part and self._drop_diverged(fragment, s)
            if self._blend and not dropped:
                weights = weights + self._blend * (self._tensors[fragment].read() - weights)
            residual = self._left(fragment, s, met.outcome, offered=True)
            self._steps, self._flying = 0, None
            self._set(fragment, FragmentState(met.after, residual), weights)

        finish(work)
        if self.exchange.trainer not in met.outcome.members:
            self._catch_up(fragment)  # it is late, and perhaps by more than one
        self._report(fragment, met, began)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._flying = None
        private = state.get("private") or {}
        self._steps = int(private["steps"]) if private.get("trainer") == self.exchange.trainer else 0

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["private"]["steps"] = self._steps
        return saved


class DiLoCo(_PeriodicTrainer):
    """Trainers that take `sync_every` steps on their own, then move on together by the mean of their updates.

    Out of `optimizer.step()` may come RoundError (there was no round; go on, the next step tries again) and StoreError
    (the same, if it is retryable), StateError (what this trainer brings does not fit, or is not finite) and
    VerificationError (replicas have parted: stop). A round whose updates are too large raises nothing: it is empty,
    and what diverged is dropped by its own trainer.

    Args:
        model: A module with FP32 parameters, or FP32 masters by name; or a sequence of such, one for each fragment.
            Buffers are each trainer's own.
        inner_optimizer: The optimizer of these parameters and no others; its state is this trainer's own.
        exchange: Connects this trainer with the others.
        outer: The outer optimizer, the same for all trainers; Nesterov(0.7, 0.9) if not given.
        sync_every: Inner steps between two rounds of a fragment. Fragments take turns, evenly.
        delay: Inner steps that are taken while a round is exchanged in the background.
        blend: The share of this trainer's own weights that is kept when a round comes in (for delay).
        on_round: Called after every round, in the training thread; let one of the trainers publish the model there.

    Raises:
        StateError: parameters are not FP32, in two fragments, or in none; ValueError: numbers that make no sense.
    """

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        *,
        exchange: Exchange,
        outer: SGD | None = None,
        sync_every: int = 8,
        delay: int = 0,
        blend: float = 0.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        super().__init__(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, DenseGate())


class PulseLoCo(_PeriodicTrainer):
    """DiLoCo that sends only what the next BF16 forward pass would see, and keeps the rest for the next round.

    Args:
        model: As for DiLoCo.
        inner_optimizer: As for DiLoCo.
        exchange: As for DiLoCo.
        outer: As for DiLoCo.
        sync_every: As for DiLoCo.
        compact: Send values rounded to this number of bits below the size of a typical one (2 or 3 are enough), and
            keep the remainder for later; if not given, FP32 values as they are.
        reach: Send an entry if this multiple of its update would be visible. 1 is PULSELoCo's gate; with outer momentum
            it sends later what dense training would already show, which `outer.reach` avoids at the cost of more bytes.
        delay: As for DiLoCo.
        blend: As for DiLoCo.
        on_round: As for DiLoCo.

    Raises:
        StateError: as for DiLoCo.
        ValueError: as for DiLoCo.
    """

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        *,
        exchange: Exchange,
        outer: SGD | None = None,
        sync_every: int = 8,
        compact: int | None = None,
        reach: float = 1.0,
        delay: int = 0,
        blend: float = 0.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        rule = VisibilityGate(compact, float(reach))
        super().__init__(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, rule)


class DDP(FragmentTrainer):
    """Averaging of gradients before every step, dense: what both others are compared with.

    It has the arguments of DiLoCo, so that a comparison changes one word.

    Args:
        model: As for DiLoCo.
        inner_optimizer: As for DiLoCo.
        exchange: As for DiLoCo.
        outer: Not used.
        sync_every: Not used: there is a round at every step.
        delay: Not used.
        blend: Not used.
        on_round: As for DiLoCo.
    """

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        *,
        exchange: Exchange,
        outer: SGD | None = None,
        sync_every: int = 1,
        delay: int = 0,
        blend: float = 0.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:
        super().__init__(model, inner_optimizer, SGD(1.0), exchange, DenseGate(), "DDP", on_round)

    def _register(self) -> Any:
        return self._inner.register_step_pre_hook(lambda *_: self._before_step())

    def _adopt(self, fragment: int, shared: SharedState) -> None:
        if shared.round and shared.digest != self._held[fragment].shared.digest:
            raise StateError("averaging at every step cannot be joined or gone on with: optimizers would part")
        super()._adopt(fragment, shared)

    def _catch_up(self, fragment: int) -> None:
        pass  # nor can a step be made up for

    def _before_step(self) -> None:
        for fragment, tensors in enumerate(self._tensors):
            began = perf_counter()
            held = self._held[fragment]
            shared = replace(held.shared, theta=tensors.read())  # where the last step has led
            self._held[fragment] = replace(held, shared=shared)
            proposal = self._propose(fragment, tensors.read(gradients=True))
            coder, exchange = self._coder(fragment, shared), self.exchange
            sent, received = exchange.sent_bytes, exchange.received_bytes
            outcome = exchange.propose(coder, exchange.prepare(coder, proposal.split), tensors.size)
            exchange.confirm(coder, outcome, None)
            mean = mean_of(outcome.total, len(outcome.members))
            if not diverges(mean):
                tensors.write_gradients(mean)
            else:
                logger.warning(
                    "Step %d is empty for all trainers: the mean of the gradients of %s has values beyond %g. No "
                    "weights change in this step.",
                    coder.round,
                    ", ".join(outcome.members),
                    LARGEST_UPDATE,
                )
                tensors.write_gradients(None)
                outcome = Outcome({}, np.zeros_like(mean))
            after = replace(shared, round=shared.round + 1)
            self._held[fragment] = replace(held, shared=after)
            passed = exchange.sent_bytes - sent, exchange.received_bytes - received
            self._report(fragment, ExchangedRound(proposal, outcome, after, *passed), began)
