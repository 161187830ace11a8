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

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from pulsesync.errors import MissingLinkError, StateError
from pulsesync.format import layout as layouts
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.gate import F32, Everything, Rule, Split, Visible, update
from pulsesync.loco.outer import SGD, Nesterov, mean_of
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, Shared, read_part
from pulsesync.model import TensorSpec


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for this trainer."""

    fragment: int
    round: int
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


class _Meeting:
    """What all three have in common: fragments, hooks, the exchange, and rounds."""

    def __init__(
        self, model: Any, inner_optimizer: Any, outer: SGD, exchange: Exchange, rule: Rule, about: str,
        on_round: Callable[[RoundReport], None] | None,
    ) -> None:  # fmt: skip
        self._tensors = _fragments(model)
        self._inner, self._outer, self._rule, self._about = inner_optimizer, outer, rule, about
        self._on_round = on_round
        self.exchange = exchange
        self.last_report: RoundReport | None = None
        self._held = [
            _Held(Shared(t.layout, t.read(), np.zeros(t.size, np.float32)), np.zeros(t.size, np.float32))
            for t in self._tensors
        ]
        self._pending: dict[int, _Proposal] = {}  # sent, and not known to have been taken or not
        self._hook: Any = None
        self._unwritten: int | None = None  # the fragment whose weights are being written

    @property
    def rounds(self) -> list[int]:
        """Rounds that led to each fragment's state."""
        return [held.shared.round for held in self._held]

    @property
    def digests(self) -> list[str]:
        """Of each fragment's shared state: equal on all trainers after every round."""
        return [held.shared.digest for held in self._held]

    def __enter__(self) -> Any:
        self.rejoin()
        self._hook = self._register()
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
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
        self.exchange = exchange or self.exchange
        found = self.exchange.join([held.shared for held in self._held], self._about)
        for fragment, shared in enumerate(found):
            self._adopt(fragment, shared)
            self._catch_up(fragment)

    def _adopt(self, fragment: int, shared: Shared) -> None:
        """Go on from a shared state that others came to."""
        held, open_ = self._held[fragment], self._pending.pop(fragment, None)
        if shared.digest == held.shared.digest:
            self._held[fragment] = replace(held, shared=shared)
            return
        mine = shared.parts.get(self.exchange.trainer)
        if mine is None or mine.round <= held.shared.round:  # none of it was taken
            residual = self._update(fragment, held)
        elif open_ is not None and mine.payload == open_.payload:
            residual = open_.split.kept
        else:  # a payload that this trainer does not remember: what was left of its residual then is not known
            residual = np.zeros_like(held.residual)
        self._set(fragment, _Held(shared, residual), shared.theta)

    def _catch_up(self, fragment: int) -> None:
        """Take part, as a listener, in rounds that were decided without this trainer."""
        while True:
            held = self._held[fragment]
            outcome = self.exchange.missed(self._coder(fragment, held.shared), held.shared.theta.size)
            if outcome is None:
                return
            after = held.shared.after(outcome, self._outer)
            residual = self._update(fragment, held)
            if outcome.taken is not None:  # by an earlier life of this trainer: what fired was not left to it
                residual[outcome.taken.positions] = 0
            self._set(fragment, _Held(after, residual), after.theta)

    def _update(self, fragment: int, held: _Held) -> F32:
        return update(held.shared.theta, self._tensors[fragment].read(), held.residual)

    def _coder(self, fragment: int, shared: Shared) -> Coder:
        described = None if self._rule.dense else describe(shared.theta, shared.momentum)
        return Coder(fragment, shared.round + 1, shared.digest, described)

    def _propose(self, fragment: int, s: F32) -> _Proposal:
        if not np.isfinite(s).all():
            name = self._tensors[fragment].name_of(int(np.flatnonzero(~np.isfinite(s))[0]))
            raise StateError(f"the update of {name!r} is not finite: nothing is sent, no round is made", tensor=name)
        held = self._held[fragment]
        return _Proposal(held, s, self._rule.split(held.shared.theta, s))

    def _meet(self, fragment: int, proposal: _Proposal) -> tuple[_Proposal, Outcome, Shared]:
        """Exchange and compute; changes nothing but what is pending."""
        shared = proposal.held.shared
        coder = self._coder(fragment, shared)
        letter = self.exchange.prepare(coder, proposal.split)
        proposal = replace(proposal, payload=letter.id)
        self._pending[fragment] = proposal  # from here on others may take it without this trainer's hearing of it
        outcome = self.exchange.propose(coder, letter, proposal.s.size)
        after = shared.after(outcome, self._outer)
        self.exchange.confirm(coder, outcome, after)
        return proposal, outcome, after

    def _residual(self, proposal: _Proposal, outcome: Outcome) -> F32:
        """What is left of an update once a round was decided."""
        taken = outcome.members.get(self.exchange.trainer)
        if taken is None:
            return proposal.s
        if taken == proposal.payload or outcome.taken is None:
            return proposal.split.kept
        left = proposal.s.copy()  # an earlier life of this trainer had sent another one: that is what was taken
        left[outcome.taken.positions] -= outcome.taken.values
        return left

    def _set(self, fragment: int, held: _Held, weights: F32) -> None:
        """Replace a fragment's state, then write its weights; if an interrupt cuts that off, the next step does it."""
        self._unwritten = fragment
        self._held[fragment] = held
        self._pending.pop(fragment, None)
        self._tensors[fragment].write(weights)
        self._unwritten = None

    def _mend(self) -> None:
        if self._unwritten is not None:
            self._tensors[self._unwritten].write(self._held[self._unwritten].shared.theta)
            self._unwritten = None

    def _report(self, fragment: int, proposal: _Proposal, outcome: Outcome, after: Shared, began: float) -> None:
        self.last_report = RoundReport(
            fragment, after.round, self.exchange.trainer in outcome.members, tuple(outcome.members),
            proposal.split.sent.positions.size, proposal.s.size, int(np.count_nonzero(outcome.total)),
            outcome.sent_bytes, outcome.received_bytes, after.digest, perf_counter() - began,
        )  # fmt: skip
        if self._on_round is not None:
            self._on_round(self.last_report)

    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, as tensors and numbers: `shared`, which a peer may be given, and `private`."""
        import torch

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
            **self._progress(),
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
        for i, saved in enumerate(state["shared"]):
            parts = {name: read_part(part) for name, part in saved["parts"].items()}
            theta, momentum = (np.array(saved[key].cpu().numpy(), np.float32) for key in ("theta", "momentum"))
            shared = Shared(saved["layout"], theta, momentum, int(saved["round"]), parts)
            residual = np.array(private["residuals"][i].cpu().numpy(), np.float32) if own else np.zeros_like(theta)
            self._held[i] = _Held(shared, residual)
            self._tensors[i].write(np.array(private["weights"][i].cpu().numpy(), np.float32) if own else theta)
        self._pending.clear()
        if own:
            self._set_progress(private)

    def _progress(self) -> dict[str, Any]:
        return {}

    def _set_progress(self, saved: Mapping[str, Any]) -> None:
        pass


class DiLoCo(_Meeting):
    """Trainers that take `sync_every` steps on their own, then move on together by the mean of their updates.

    Args:
        model: A module with FP32 parameters, or FP32 masters by name; or a sequence of such, one for each fragment.
        inner_optimizer: The optimizer of these parameters; its state is this trainer's own.
        outer: The outer optimizer, the same for all trainers.
        sync_every: Inner steps between two rounds of a fragment. Fragments take turns, evenly.
        exchange: The way to the other trainers.
        delay: Inner steps that go on while a round is exchanged, in the background.
        blend: The share of this trainer's own weights that is kept when a round comes in (for delay).
        on_round: Called after every round, in the training thread; publish the model there.
    """

    def __init__(
        self, model: Any, inner_optimizer: Any, *, exchange: Exchange, outer: SGD | None = None, sync_every: int = 8,
        delay: int = 0, blend: float = 0.0, on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:  # fmt: skip
        self._begin(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, Everything())

    def _begin(
        self, model: Any, inner_optimizer: Any, exchange: Exchange, outer: SGD | None, sync_every: int, delay: int,
        blend: float, on_round: Callable[[RoundReport], None] | None, rule: Rule,
    ) -> None:  # fmt: skip
        outer = outer or Nesterov()
        about = f"{type(self).__name__} {outer} {rule} delay={delay} blend={blend}"
        super().__init__(model, inner_optimizer, outer, exchange, rule, about, on_round)
        count = len(self._tensors)
        if sync_every < 1 or sync_every % count or not 0 <= delay < sync_every // count or not 0 <= blend <= 1:
            raise ValueError(
                f"sync_every={sync_every} must be a multiple of the {count} fragments, delay={delay} below the steps "
                f"between two turns, blend={blend} from 0 to 1"
            )
        self._period, self._delay, self._blend = sync_every // count, delay, np.float32(blend)
        self._steps = self._turn = 0
        self._flying: tuple[float, Future[tuple[_Proposal, Outcome, Shared]]] | None = None
        self._behind: ThreadPoolExecutor | None = None

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._behind is not None:
            self._behind.shutdown()
            self._behind = self._flying = None

    def _after_step(self) -> None:
        self._mend()
        self._steps += 1
        try:
            self._take_turn()
        except MissingLinkError:  # away for so long that the rounds since are gone: only a state leads on
            self.rejoin()

    def _take_turn(self) -> None:
        if self._flying is None and self._steps >= self._period - self._delay:
            proposal = self._propose(self._turn, self._update(self._turn, self._held[self._turn]))
            self._flying = perf_counter(), self._start(self._turn, proposal)
        if self._steps < self._period:
            return
        assert self._flying is not None
        (began, future), self._flying = self._flying, None
        proposal, outcome, after = future.result()  # a failure leaves the count of steps: the next one tries again
        fragment = self._turn
        weights = after.theta
        if self._blend:
            weights = weights + self._blend * (self._tensors[fragment].read() - weights)
        self._steps, self._turn = 0, (fragment + 1) % len(self._tensors)
        self._set(fragment, _Held(after, self._residual(proposal, outcome)), weights)
        if self.exchange.trainer not in outcome.members:
            self._catch_up(fragment)  # it is late, and perhaps by more than one
        self._report(fragment, proposal, outcome, after, began)

    def _start(self, fragment: int, proposal: _Proposal) -> Future[tuple[_Proposal, Outcome, Shared]]:
        if self._delay:
            self._behind = self._behind or ThreadPoolExecutor(1, "pulse-loco")
            return self._behind.submit(self._meet, fragment, proposal)
        future: Future[tuple[_Proposal, Outcome, Shared]] = Future()
        future.set_result(self._meet(fragment, proposal))
        return future

    def _progress(self) -> dict[str, Any]:
        return {"steps": self._steps, "turn": self._turn}

    def _set_progress(self, saved: Mapping[str, Any]) -> None:
        self._steps, self._turn = int(saved["steps"]), int(saved["turn"])


class PulseLoCo(DiLoCo):
    """DiLoCo that sends only what the next BF16 forward pass would see, and keeps the rest for the next round.

    Args:
        model: As for DiLoCo, like everything that is not described here.
        inner_optimizer: The same.
        outer: The same.
        sync_every: The same.
        exchange: The same.
        compact: Send values rounded to so many bits below the size of a typical one (2 or 3 do), and keep the
            remainder; if not given, FP32 values as they are.
        delay: The same.
        blend: The same.
        on_round: The same.
    """

    def __init__(
        self, model: Any, inner_optimizer: Any, *, exchange: Exchange, outer: SGD | None = None, sync_every: int = 8,
        compact: int | None = None, delay: int = 0, blend: float = 0.0,
        on_round: Callable[[RoundReport], None] | None = None,
    ) -> None:  # fmt: skip
        rule = Visible(compact)
        self._begin(model, inner_optimizer, exchange, outer, sync_every, delay, blend, on_round, rule)


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

    def _catch_up(self, fragment: int) -> None:
        pass  # a step that was missed cannot be made up for: the optimizers' states would part

    def _before_step(self) -> None:
        for fragment, tensors in enumerate(self._tensors):
            began = perf_counter()
            held = self._held[fragment]
            shared = replace(held.shared, theta=tensors.read())  # where the last step has led
            self._held[fragment] = replace(held, shared=shared)
            proposal = self._propose(fragment, tensors.read(gradients=True))
            coder = self._coder(fragment, shared)
            outcome = self.exchange.propose(coder, self.exchange.prepare(coder, proposal.split), tensors.size)
            self.exchange.confirm(coder, outcome, None)
            after = replace(shared, round=shared.round + 1)
            self._held[fragment] = replace(held, shared=after)
            tensors.write(mean_of(outcome.total, len(outcome.members)), gradients=True)
            self._report(fragment, proposal, outcome, after, began)
