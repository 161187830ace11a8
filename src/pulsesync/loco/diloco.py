"""Several trainers that exchange updates every few steps: DiLoCo, PULSELoCo, and averaging of gradients at every step.

All three are contexts that use the inner optimizer's hooks. They take the same arguments, so that they are easy to
compare.

    with PulseLoCo(model, optimizer, outer=Nesterov(0.7, 0.9), sync_every=8, exchange=GroupExchange()):
        for batch in data:
            loss(model, batch).backward()
            optimizer.step()  # every eighth step ends with a round
            optimizer.zero_grad()

The model of a PULSELoCo trainer also contains updates that were not sent yet: publish and evaluate `shared_weights()`.

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
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from pulsesync.core import arguments
from pulsesync.errors import MissingLinkError, RoundError, StoreError
from pulsesync.loco.commit import SameRoundRejoiner
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.fragments import Commit, Fragment, in_own_streams
from pulsesync.loco.gate import DenseGate, GateRule, VisibilityGate, WholeUpdate
from pulsesync.loco.outer_step import (
    LARGEST_UPDATE,
    SGD,
    Nesterov,
    OwnMomentum,
    SharedMomentum,
    TrainerUpdate,
    diverges,
    mean_of,
)
from pulsesync.loco.round_exchange import ExchangedRound
from pulsesync.loco.rounds import FragmentTrainer, RoundReport, noting_failure
from pulsesync.loco.shared import RoundResult
from pulsesync.loco.vectors import Vector

logger = logging.getLogger(__name__)

EXIT_S = 60.0  # how long a context waits at its end for a round in progress


class _BackgroundRound:
    """A round that is exchanged in the background, by a daemon: it does not keep the process alive."""

    def __init__(
        self, fragment: Fragment, update: TrainerUpdate, began: float, work: Callable[[], ExchangedRound]
    ) -> None:
        self.fragment, self.update, self.began = fragment, update, began
        self._future: Future[ExchangedRound | BaseException] = Future()
        threading.Thread(target=self._run, args=(work,), name="pulse-loco", daemon=True).start()

    def _run(self, work: Callable[[], ExchangedRound]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - raised where it is waited for
            self._future.set_result(e)

    def wait(self, timeout_s: float | None) -> ExchangedRound | BaseException:
        """The result, or the exception of the round, to distinguish it from one of waiting. Raises: TimeoutError."""
        return self._future.result(timeout_s)


class RoundOptions(TypedDict, total=False):
    """The arguments that trainers with rounds have in common: see DiLoCo."""

    exchange: Required[Exchange]
    outer: SGD | None
    sync_every: int
    delay: int
    blend: float
    on_round: Callable[[RoundReport], None] | None


class DiLoCo(FragmentTrainer):
    """Trainers that take `sync_every` steps on their own, then all apply the mean of their updates.

    `optimizer.step()` may raise RoundError (the round failed for this trainer; the next step tries again), StoreError
    (the same, if it is retryable), StateError (this trainer's update does not fit, or is not finite) and
    VerificationError (replicas have diverged: stop). A round whose updates are too large raises nothing: it is empty,
    and the update that diverged is dropped by its own trainer.

    Args:
        model: A module with FP32 parameters, or FP32 masters by name; or a sequence of such, one for each fragment.
            Buffers are not shared.
        inner_optimizer: The optimizer of these parameters and no others; its state is not shared.
        exchange: Connects this trainer with the others.
        outer: The outer optimizer, the same for all trainers; Nesterov(0.7, 0.9) if not given.
        sync_every: Inner steps between two rounds of a fragment. Fragments take turns, evenly.
        delay: Inner steps that are taken while a round is exchanged in the background.
        blend: The share of this trainer's own weights that is kept when a round is applied (for delay).
        on_round: Called after every round, in the training thread; let one of the trainers publish
            `shared_weights()` there.

    Raises:
        StateError: parameters are not FP32, or are in two fragments or in none; ValueError: a number is out of range.
    """

    _gate: GateRule = DenseGate()
    _rule: type[OwnMomentum] | type[SharedMomentum] = SharedMomentum

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
        outer = outer or Nesterov()
        if not isinstance(outer, SGD):
            raise TypeError(
                f"outer must be pulsesync.loco.Nesterov(lr, momentum) or SGD(lr); got {type(outer).__name__}"
            )
        sync_every = arguments.whole("sync_every", sync_every, 1, what="a number of steps")
        delay = arguments.whole("delay", delay, what="a number of steps")
        blend = arguments.number("blend", blend, what="a fraction")
        arguments.function("on_round", on_round)
        about = f"{type(self).__name__} {outer} {self._gate} sync_every={sync_every} delay={delay} blend={float(blend)}"
        super().__init__(model, inner_optimizer, exchange, self._gate, self._rule(outer), about, on_round)
        count = len(self._fragments)
        if sync_every % count or not 0 <= delay < sync_every // count or not 0 <= blend <= 1:
            raise ValueError(
                f"sync_every={sync_every} must be a multiple of the number of fragments, {count}; delay={delay} must "
                f"be below the steps between two rounds of a fragment; and blend={blend} must be from 0 to 1"
            )
        self._period, self._delay = sync_every // count, delay
        self._blend = float(np.float32(blend))
        self._steps = 0  # since the last round of any fragment
        self._round_in_background: _BackgroundRound | None = None

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            if kind is None:
                self._finish_before_exit()  # the other trainers wait for it at the same step, or have left
        finally:
            self._round_in_background = None
            super().__exit__()

    def rejoin(self, exchange: Exchange | None = None) -> None:
        with suppress(Exception):  # the result of a round in progress does not matter: its payload is pending
            self._finish_before_exit()
        self._round_in_background = None
        super().rejoin(exchange)

    def _finish_before_exit(self) -> None:
        """Wait up to EXIT_S for a round in progress, and commit it."""
        if self._round_in_background is not None:
            with suppress(TimeoutError):
                self._finish_round(self._round_in_background, EXIT_S)

    def _after_step(self) -> None:
        self._committer.complete_pending()
        self._steps += 1
        try:
            if self._round_in_background is None and self._steps >= self._period - self._delay:
                self._begin_round()
            if self._round_in_background is not None and self._steps >= self._period:
                self._finish_round(self._round_in_background)
        except MissingLinkError as e:  # absent for so long that the rounds since were deleted
            logger.warning(
                "Trainer %s rejoins, because it cannot apply the rounds that it has missed: %s.",
                self.exchange.trainer,
                e,
            )
            self.rejoin()

    def _begin_round(self) -> None:
        """Begin a round of a fragment, in the background if there is a delay; without one, finish it."""
        # The first of those with the fewest rounds, so that all trainers choose the same.
        fragment, began = min(self._fragments, key=lambda one: one.shared.round), perf_counter()
        with noting_failure(fragment):
            shared, update = fragment.shared, fragment.update(snapshot=bool(self._delay))
            part = self._round_exchange.select(fragment, update)
            done = None if self._delay else self._round_exchange.run(fragment, shared, part)
        if done is not None:
            self._commit(fragment, update, done, began)
            return
        self._round_in_background = _BackgroundRound(
            fragment, update, began, lambda: self._round_exchange.run(fragment, shared, part)
        )

    def _finish_round(self, begun: _BackgroundRound, timeout_s: float | None = None) -> None:
        done = begun.wait(timeout_s)  # if this is interrupted, the round is still in progress
        if isinstance(done, BaseException):
            self._round_in_background = None
            with noting_failure(begun.fragment):
                raise done
        self._commit(begun.fragment, begun.update, done, begun.began)

    def _commit(self, fragment: Fragment, update: TrainerUpdate, done: ExchangedRound, began: float) -> None:
        """Change everything at once, even if interrupted. After an earlier failure the next step tries again."""
        shared, payload = done.result.after, done.result.members.get(self.exchange.trainer)
        # If the round contains an update that this trainer sent before a restart, that is subtracted: it included the
        # same residual.
        taken = None if payload is None else fragment.pending.sent(payload, done.taken)

        def work() -> None:
            self._steps, self._round_in_background = 0, None
            if payload is None and not done.part.largest <= LARGEST_UPDATE:
                self._committer.drop(fragment, update, shared, self.exchange.trainer)
            else:
                self._committer.close(fragment, Commit(update, taken, shared, self._blend))

        self._committer.finish(work)
        try:
            if payload is None:
                self._rejoiner.catch_up(fragment)  # it is late, perhaps by more than one round
        except (RoundError, StoreError) as e:
            if isinstance(e, StoreError) and not e.retryable:
                raise
            logger.warning(
                "Trainer %s is late and could not apply the rounds that it has missed: %s: %s. It tries again in its "
                "next round.",
                self.exchange.trainer,
                type(e).__name__,
                e,
            )
        finally:  # the round is committed, whatever happens after it
            self._report(fragment, done, began)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._round_in_background = None
        private = state.get("private") or {}
        self._steps = int(private.get("steps", 0)) if private.get("trainer") == self.exchange.trainer else 0

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["private"]["steps"] = self._steps
        return saved


class PulseLoCo(DiLoCo):
    """DiLoCo that sends only what the next BF16 forward pass would see, and keeps the rest for later rounds.

    Two things differ from the published form (`PublishedPulseLoCo`). Each trainer has an outer momentum of its own,
    which acts before the gate. And updates that were not sent yet stay in the trainer's weights, so that it continues
    from there. The model's weights therefore differ between trainers: publish and evaluate `shared_weights()`.

    Args:
        model: As for DiLoCo.
        inner_optimizer: As for DiLoCo.
        compact: Send values rounded to this number of bits below the size of a typical one, and keep the remainder for
            later rounds; None sends FP32 values as they are, which takes about nine times the bytes.
        reach: Send an entry if this multiple of its update would be visible. Larger values send more entries, earlier.
        **options: As for DiLoCo: exchange, outer, sync_every, delay, blend and on_round.

    Raises:
        StateError, ValueError: as for DiLoCo.
    """

    _rule = OwnMomentum

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        *,
        compact: int | None = 0,
        reach: float = 1.4,
        **options: Unpack[RoundOptions],
    ) -> None:
        self._gate = VisibilityGate(compact, float(reach))
        super().__init__(model, inner_optimizer, **options)


class PublishedPulseLoCo(DiLoCo):
    """PULSELoCo as it was published: one outer momentum, which all trainers share.

    A round begins at the shared weights; what was not sent is kept separately until a later round.

    With outer momentum it learns later than DiLoCo does: see docs/loco.md.

    Args:
        model: As for DiLoCo.
        inner_optimizer: As for DiLoCo.
        compact: As for PulseLoCo; the published form sends FP32 values as they are.
        reach: As for PulseLoCo; the published form has 1.
        **options: As for DiLoCo: exchange, outer, sync_every, delay, blend and on_round.

    Raises:
        StateError, ValueError: as for DiLoCo.
    """

    def __init__(
        self,
        model: Any,
        inner_optimizer: Any,
        *,
        compact: int | None = None,
        reach: float = 1.0,
        **options: Unpack[RoundOptions],
    ) -> None:
        self._gate = VisibilityGate(compact, float(reach))
        super().__init__(model, inner_optimizer, **options)


class DDP(FragmentTrainer):
    """Averaging of gradients before every step, dense: the baseline of the other two.

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

    _rejoiner_class = SameRoundRejoiner

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
        super().__init__(model, inner_optimizer, exchange, DenseGate(), SharedMomentum(SGD(1.0)), "DDP", on_round)

    def _register(self) -> Any:
        return self._inner.register_step_pre_hook(lambda *_: self._before_step())

    def _shared_values(self, fragment: Fragment) -> Vector:
        # The inner steps, which are equal on all trainers, have changed the weights since theta.
        with in_own_streams([fragment]):
            return fragment.tensors.read()

    def _before_step(self) -> None:
        for fragment in self._fragments:
            began = perf_counter()
            with noting_failure(fragment), in_own_streams([fragment]):
                done, mean = self._average(fragment)
            fragment.tensors.write_gradients(mean)
            self._report(fragment, done, began)

    def _average(self, fragment: Fragment) -> tuple[ExchangedRound, Vector | None]:
        """Exchange the gradients of a fragment; return their mean, or None if it diverges."""
        tensors, exchange = fragment.tensors, self.exchange
        fragment.shared = shared = replace(fragment.shared, theta=tensors.read())  # the weights after the last step
        part = self._round_exchange.select(fragment, WholeUpdate(tensors.read(gradients=True)))
        coder = self._round_exchange.coder(fragment, shared)
        sent, received = exchange.sent_bytes, exchange.received_bytes
        decided = exchange.propose(coder, exchange.prepare(coder, part), tensors.size)
        exchange.confirm(coder, decided, None)
        mean, members = mean_of(decided.total, len(decided.members)), decided.members
        moved = tensors.vectors.kernels.count_nonzero(mean)
        if diverges(mean):
            logger.warning(
                "Step %d is empty for all trainers in fragment %d: the mean of the gradients of %s has values "
                "beyond %g. The weights of that fragment do not change in this step.",
                coder.round,
                fragment.index,
                ", ".join(members),
                LARGEST_UPDATE,
            )
            mean, members, moved = None, {}, 0
        fragment.shared = after = replace(shared, round=shared.round + 1)
        passed = exchange.sent_bytes - sent, exchange.received_bytes - received
        return ExchangedRound(part, RoundResult(members, moved, after), None, *passed), mean
