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

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from pulsesync.errors import MissingLinkError, StateError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.gate import F32, Everything, Rule, Sparse, Split, Visible, update
from pulsesync.loco.outer import SGD, Nesterov, mean_of
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, Shared, read_part
from pulsesync.model import TensorSpec
from pulsesync.parallel import finish

EXIT_S = 60.0  # that a context waits, when it ends, for a round that is on its way


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for this trainer."""

    fragment: int
    round: int  # that its weights are at now
    took_part: bool  # False: the round was decided without it, and all its update was kept
    members: tuple[str, ...]
    sent: int  # entries that it sent ...
    total: int  # ... of so many
    moved: int  # entries in which the sum of all is not zero
    sent_bytes: int  # everything counted
    received_bytes: int
    digest: str  # of the shared state it led to
    seconds: float


@dataclass(frozen=True, eq=False)
class _Held:
    """A fragment's state: shared, and private. Replaced whole, so that both change at once."""

    shared: Shared
    residual: F32


@dataclass(frozen=True, eq=False)
class _Proposal:
    """An update on its way, and what it was made of."""

    held: _Held
    s: F32
    split: Split
    payload: str = ""


@dataclass(frozen=True, eq=False)
class _Met:
    """A round that was exchanged and computed, and not committed yet."""

    proposal: _Proposal
    outcome: Outcome
    after: Shared
    sent_bytes: int
    received_bytes: int


class _Tensors:
    """The parameters of a fragment as one FP32 vector."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        import torch

        for name, tensor in parameters.items():
            if tensor.dtype != torch.float32:
                raise StateError(
                    f"parameter {name!r} is {tensor.dtype}: trainers average FP32 master weights. Keep the model in "
                    "FP32 and compute in BF16 with autocast, or give the masters as a mapping of names to tensors",
                    tensor=name,
                )  # fmt: skip
        self._tensors = dict(parameters)
        specs = [TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in parameters.items()]
        self.layout = layouts.make(specs).id
        self.size = sum(spec.size for spec in specs)

    def begin(self) -> _Held:
        """The state that nothing has been learned in yet."""
        zeros = np.zeros(self.size, np.float32)
        return _Held(Shared(self.layout, self.read(), zeros), zeros)

    def _places(self) -> Iterator[tuple[str, Any, slice]]:
        at = 0
        for name, tensor in self._tensors.items():
            yield name, tensor, slice(at, at + tensor.numel())
            at += tensor.numel()

    def read(self, gradients: bool = False) -> F32:
        """A copy, in host memory."""
        out = np.zeros(self.size, np.float32)
        for _, tensor, place in self._places():
            source = tensor.grad if gradients else tensor
            if source is not None:
                out[place] = source.detach().reshape(-1).cpu().numpy()
        return out

    def write(self, values: F32, gradients: bool = False) -> None:
        import torch

        with torch.no_grad():
            for _, tensor, place in self._places():
                new = torch.from_numpy(values[place]).view(tensor.shape)
                if not gradients:
                    tensor.copy_(new)
                elif tensor.grad is None:
                    tensor.grad = new.to(tensor.device, copy=True)
                else:
                    tensor.grad.copy_(new)

    def vector(self, saved: Any) -> F32:
        """A saved vector of this fragment, in memory of its own. Raises: StateError, if it is none."""
        values = np.array(saved.cpu().numpy(), np.float32)
        if values.shape != (self.size,):
            raise StateError(f"the saved state has {values.size} weights, and the fragment {self.size}")
        return values

    def addresses(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors.values()]

    def name_of(self, entry: int) -> str:
        return next(name for name, _, place in self._places() if entry < place.stop)


def _fragments(model: Any) -> list[_Tensors]:
    """One for a module or a mapping of masters, or one for each of several."""
    pieces = model if isinstance(model, Sequence) and not hasattr(model, "named_parameters") else [model]
    found = [
        dict(piece) if isinstance(piece, Mapping)
        else {name: tensor for name, tensor in piece.named_parameters() if tensor.requires_grad}
        for piece in pieces
    ]  # fmt: skip
    everyone = [tensor.data_ptr() for tensors in found for tensor in tensors.values() if tensor.numel()]
    if len(set(everyone)) != len(everyone):
        raise StateError("a parameter is in two fragments, or twice in one")
    if not all(found):
        raise StateError("a fragment has no parameters to train")
    return [_Tensors(tensors) for tensors in found]


def _check_covered(optimizer: Any, fragments: Sequence[_Tensors]) -> None:
    """Raises: StateError, if the optimizer moves what no fragment has: replicas would part in it."""
    known = {address for fragment in fragments for address in fragment.addresses()}
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and p.numel()]
    if missing := [tuple(p.shape) for p in moved if p.data_ptr() not in known]:
        raise StateError(f"the inner optimizer trains {len(missing)} parameters that no fragment has: {missing[0]}")


class _Meeting:
    """What all three have in common: fragments, hooks, the exchange, and rounds."""

    def __init__(
        self, model: Any, inner_optimizer: Any, outer: SGD, exchange: Exchange, rule: Rule, about: str,
        on_round: Callable[[RoundReport], None] | None,
    ) -> None:  # fmt: skip
        if not isinstance(outer, SGD):
            raise TypeError(f"outer is pulsesync.loco.Nesterov(lr, momentum) or SGD(lr), not {type(outer).__name__}")
        self._tensors = _fragments(model)
        _check_covered(inner_optimizer, self._tensors)
        self._inner, self._outer, self._rule, self._about = inner_optimizer, outer, rule, about
        self._on_round = on_round
        self.exchange = exchange
        self.last_report: RoundReport | None = None
        self._held = [t.begin() for t in self._tensors]
        self._begun = False  # until then weights that are loaded into the model are where it begins
        # By fragment and payload: what was sent since its last round, and may have been taken without our hearing of it
        self._pending: list[dict[str, Sparse]] = [{} for _ in self._tensors]
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
            self._held, self._begun = [t.begin() for t in self._tensors], True
        self.exchange = exchange or self.exchange
        found = self.exchange.join([held.shared for held in self._held], self._about)
        for fragment, shared in enumerate(found):
            self._adopt(fragment, shared)
            self._catch_up(fragment)
        self._known_as = self.exchange.trainer

    def discard(self) -> None:
        """Put the weights back to the shared ones: for one whose steps came to nothing, or to what is no number."""
        for fragment, held in enumerate(self._held):
            self._set(fragment, held, held.shared.theta)

    def _adopt(self, fragment: int, shared: Shared) -> None:
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
        self._set(fragment, _Held(shared, residual), shared.theta)

    def _catch_up(self, fragment: int) -> None:
        """Take part, as a listener, in rounds that were decided without this trainer."""
        while True:
            held = self._held[fragment]
            outcome = self.exchange.missed(self._coder(fragment, held.shared), held.shared.theta.size)
            if outcome is None:
                return
            after = held.shared.after(outcome, self._outer)
            residual = self._left(fragment, self._update(fragment, held), outcome, offered=False)
            self._set(fragment, _Held(after, residual), after.theta)

    def _update(self, fragment: int, held: _Held) -> F32:
        return update(held.shared.theta, self._tensors[fragment].read(), held.residual)

    def _coder(self, fragment: int, shared: Shared) -> Coder:
        described = None if self._rule.dense else describe(shared.theta, shared.momentum)
        return Coder(fragment, shared.round + 1, shared.digest, described)

    def _propose(self, fragment: int, s: F32) -> _Proposal:
        held = self._held[fragment]
        if not np.isfinite(s).all():
            name = self._tensors[fragment].name_of(int(np.flatnonzero(~np.isfinite(s))[0]))
            self.exchange.decline(self._coder(fragment, held.shared), s.size, f"an update of {name} is not finite")
            raise StateError(
                f"the update of {name!r} is not finite: nothing is sent. `discard()` goes back to the shared weights",
                tensor=name,
            )
        return _Proposal(held, s, self._rule.split(held.shared.theta, s))

    def _meet(self, fragment: int, proposal: _Proposal) -> _Met:
        """Exchange and compute; changes nothing but what is pending."""
        shared, exchange = proposal.held.shared, self.exchange
        sent, received = exchange.sent_bytes, exchange.received_bytes
        coder = self._coder(fragment, shared)
        letter = exchange.prepare(coder, proposal.split)
        proposal = replace(proposal, payload=letter.id)
        self._pending[fragment][letter.id] = proposal.split.sent
        outcome = exchange.propose(coder, letter, proposal.s.size)
        after = shared.after(outcome, self._outer)
        exchange.confirm(coder, outcome, after)
        return _Met(proposal, outcome, after, exchange.sent_bytes - sent, exchange.received_bytes - received)

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

    def _set(self, fragment: int, held: _Held, weights: F32) -> None:
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

    def _report(self, fragment: int, met: _Met, began: float) -> None:
        outcome, shared = met.outcome, self._held[fragment].shared  # of one that was late, further than the round
        self.last_report = RoundReport(
            fragment, shared.round, self.exchange.trainer in outcome.members, tuple(outcome.members),
            met.proposal.split.sent.positions.size, met.proposal.s.size, int(np.count_nonzero(outcome.total)),
            met.sent_bytes, met.received_bytes, shared.digest, perf_counter() - began,
        )  # fmt: skip
        if self._on_round is not None:
            self._on_round(self.last_report)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, as tensors and numbers: `shared`, which a peer may be given, and `private`."""
        import torch

        self._mend()

        def tensor(values: F32) -> Any:
            return torch.from_numpy(values.copy())

        shared = [
            {"layout": h.shared.layout, "round": h.shared.round, "theta": tensor(h.shared.theta),
             "momentum": tensor(h.shared.momentum), "parts": {k: list(v) for k, v in h.shared.parts.items()}}
            for h in self._held
        ]  # fmt: skip
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
            shared = Shared(saved["layout"], theta, momentum, int(saved["round"]), parts)
            zeros = np.zeros(tensors.size, np.float32)
            read.append(_Held(shared, tensors.vector(private["residuals"][i]) if own else zeros))
            weights.append(tensors.vector(private["weights"][i]) if own else theta)
        self._held, self._pending = read, [{} for _ in read]
        self._unwritten = dict(enumerate(weights))
        self._mend()
        self._known_as = private.get("trainer", self.exchange.trainer)
        self._begun = True


class _Flight:
    """A round that is exchanged behind training. A daemon: nobody need wait for it to end the process."""

    def __init__(self, fragment: int, began: float, work: Callable[[], _Met]) -> None:
        self.fragment, self.began = fragment, began
        self._future: Future[_Met | BaseException] = Future()
        threading.Thread(target=self._run, args=(work,), name="pulse-loco", daemon=True).start()

    def _run(self, work: Callable[[], _Met]) -> None:
        try:
            self._future.set_result(work())
        except BaseException as e:  # noqa: BLE001 - raised where it is waited for
            self._future.set_result(e)

    def wait(self, timeout_s: float | None) -> _Met | BaseException:
        """What came of it; an exception too is returned, to tell it from one of the waiting. Raises: TimeoutError."""
        return self._future.result(timeout_s)


class _Rounds(_Meeting):
    """Trainers that meet every so many steps: what DiLoCo and PULSELoCo have in common is all but the rule."""

    def __init__(
        self, model: Any, inner_optimizer: Any, exchange: Exchange, outer: SGD | None, sync_every: int, delay: int,
        blend: float, on_round: Callable[[RoundReport], None] | None, rule: Rule,
    ) -> None:  # fmt: skip
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
        self._flying: _Flight | None = None

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
                self._flying = _Flight(fragment, began, lambda: self._meet(fragment, proposal))
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

    def _commit(self, fragment: int, met: _Met, began: float) -> None:
        """Change everything at once, whatever interrupts. After a failure before this the next step tries again."""

        def work() -> None:
            weights = met.after.theta
            if self._blend:
                weights = weights + self._blend * (self._tensors[fragment].read() - weights)
            residual = self._left(fragment, met.proposal.s, met.outcome, offered=True)
            self._steps, self._flying = 0, None
            self._set(fragment, _Held(met.after, residual), weights)

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


class DiLoCo(_Rounds):
    """Trainers that take `sync_every` steps on their own, then move on together by the mean of their updates.

    Out of `optimizer.step()` may come RoundError (there was no round; go on, the next step tries again) and StoreError
    (the same, if it is retryable), StateError (what this trainer brings does not fit, or is not finite) and
    VerificationError (replicas have parted: stop).

    Args:
        model: A module with FP32 parameters, or FP32 masters by name; or a sequence of such, one for each fragment.
            Buffers are each trainer's own.
        inner_optimizer: The optimizer of these parameters and no others; its state is this trainer's own.
        exchange: The way to the other trainers.
        outer: The outer optimizer, the same for all trainers; Nesterov(0.7, 0.9) if not given.
        sync_every: Inner steps between two rounds of a fragment. Fragments take turns, evenly.
        delay: Inner steps that go on while a round is exchanged, in the background.
        blend: The share of this trainer's own weights that is kept when a round comes in (for delay).
        on_round: Called after every round, in the training thread; let one of the trainers publish the model there.

    Raises:
        StateError: parameters are not FP32, in two fragments, or in none; ValueError: numbers that make no sense.
    """

    def __init__(
        self, model: Any, inner_optimizer: Any, *, exchange: Exchange, outer: SGD | None = None, sync_every: int = 8,
        delay: int = 0, blend: float = 0.0, on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, Everything())


class PulseLoCo(_Rounds):
    """DiLoCo that sends only what the next BF16 forward pass would see, and keeps the rest for the next round.

    Args:
        model: This, and all that is not described here, is as for DiLoCo; so is what may be raised.
        inner_optimizer: As for DiLoCo.
        exchange: As for DiLoCo.
        outer: As for DiLoCo.
        sync_every: As for DiLoCo.
        compact: Send values rounded to so many bits below the size of a typical one (2 or 3 do), and keep the
            remainder; if not given, FP32 values as they are.
        reach: Let entries fire that so many times their update would make visible. 1 is PULSELoCo's gate; with outer
            momentum it sends late what dense training would already show, and `outer.reach` costs bytes and does not.
        delay: As for DiLoCo.
        blend: As for DiLoCo.
        on_round: As for DiLoCo.
    """

    def __init__(
        self, model: Any, inner_optimizer: Any, *, exchange: Exchange, outer: SGD | None = None, sync_every: int = 8,
        compact: int | None = None, reach: float = 1.0, delay: int = 0, blend: float = 0.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:  # fmt: skip
        rule = Visible(compact, float(reach))
        super().__init__(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, rule)


class DDP(_Meeting):
    """Averaging of gradients before every step, dense: what both others are compared with.

    Takes the arguments of DiLoCo so that a comparison changes one word; outer, sync_every, delay and blend mean nothing
    here.
    """

    def __init__(
        self, model: Any, inner_optimizer: Any, *, exchange: Exchange, outer: SGD | None = None, sync_every: int = 1,
        delay: int = 0, blend: float = 0.0, on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, inner_optimizer, SGD(1.0), exchange, Everything(), "DDP", on_round)

    def _register(self) -> Any:
        return self._inner.register_step_pre_hook(lambda *_: self._before_step())

    def _adopt(self, fragment: int, shared: Shared) -> None:
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
            tensors.write(mean_of(outcome.total, len(outcome.members)), gradients=True)
            after = replace(shared, round=shared.round + 1)
            self._held[fragment] = replace(held, shared=after)
            passed = exchange.sent_bytes - sent, exchange.received_bytes - received
            self._report(fragment, _Met(proposal, outcome, after, *passed), began)
