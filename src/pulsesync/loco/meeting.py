"""What DiLoCo, PULSELoCo and DDP have in common: fragments, hooks, the exchange, and rounds as transactions."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from pulsesync.core.events import RoundCompleted, RoundFailed, describe_error, emit, has_listeners
from pulsesync.core.threads import finish
from pulsesync.errors import FormatError, MissingLinkError, StateError, StoreError
from pulsesync.loco.exchange import Exchange
from pulsesync.loco.fragments import FragmentTensors, Place, check_covered, fragments_of, named_tensors, place_of
from pulsesync.loco.gate import GateRule, ReadPiece, SentUpdate, SparseVector, Update
from pulsesync.loco.outer import LARGEST_UPDATE, OuterRule, TrainerUpdate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, RoundResult, SharedState, read_part, read_trend
from pulsesync.loco.vectors import Vector, vectors_of

logger = logging.getLogger(__name__)

FORMAT = "pulse-loco-trainer/1"  # of what state_dict() returns
LARGEST_FINITE = np.finfo(np.float32).max
Method = TypeVar("Method", bound=Callable[..., Any])
MOST_ATTEMPTS = 8  # at a round, each with an update of its own: more of them would fill the memory


@dataclass(frozen=True)
class RoundReport:
    """What a round came to, for this trainer."""

    fragment: int
    round: int  # that its weights are at now
    took_part: bool  # False: the round did not take its update, which was kept, or dropped if it had diverged
    members: tuple[str, ...]  # none: the round was empty, because its updates or its result were too large
    sent: int  # entries that it sent ...
    total: int  # ... of so many
    moved: int  # entries in which the mean of all updates is not zero
    sent_bytes: int  # everything counted
    received_bytes: int
    digest: str  # of the shared state it led to
    seconds: float


@dataclass(eq=False)
class FragmentState:
    """A fragment's state: what is shared, and what is this trainer's own. Changed in one go, when a round is committed.

    The shared state is replaced; residual and momentum, which nobody else holds, are written in place.
    """

    shared: SharedState
    residual: Vector
    momentum: Vector | None  # None where the outer momentum is shared
    new: bool = True  # whether this trainer has nothing of its own: it has offered no update yet, or was cleared

    def clear(self) -> None:
        """Forget what is this trainer's own."""
        self.new = True
        for own in (self.residual, self.momentum):
            if own is not None:
                own[:] = 0


@dataclass(frozen=True, eq=False)
class ExchangedRound:
    """A round that was exchanged and computed, and not committed yet."""

    part: SentUpdate  # what this trainer has sent
    result: RoundResult
    taken: SparseVector | None  # what was taken from a trainer of this one's name, if the exchange has it at hand
    sent_bytes: int
    received_bytes: int


class Commit(NamedTuple):
    """What is to be done when a round has taken part of an update: all of it, whatever fails in between."""

    update: TrainerUpdate
    taken: SparseVector | None
    shared: SharedState
    blend: float  # the share of this trainer's own weights that is kept


@dataclass
class PendingUpdates:
    """The updates that a trainer has sent since its last round. One may have been taken although an error came back."""

    by_payload: dict[str, SentUpdate] = field(default_factory=dict)
    attempts: int = 0  # with updates of their own, since the round began or steps were discarded

    def choose(self, part: SentUpdate) -> SentUpdate:
        """Return the update to send: this one, or after many attempts the last one again.

        What was learned since that one is in the weights, and counts in the next round.
        """
        if self.attempts < MOST_ATTEMPTS:
            return part
        return replace(next(reversed(self.by_payload.values())), largest=part.largest)

    def add(self, payload: str, part: SentUpdate) -> None:
        self.attempts += payload not in self.by_payload
        self.by_payload.pop(payload, None)  # so that it becomes the last
        self.by_payload[payload] = part

    def sent(self, payload: str, read: SparseVector | None) -> SparseVector | None:
        """What a payload held: as it was sent, or, if an earlier life of the trainer sent it, as it was read."""
        return self.by_payload[payload].sent if payload in self.by_payload else read


def aside(method: Method) -> Method:
    """Let a method compute where the fragments are, in order with what the caller launches there before and after it.

    On a GPU that is in a stream of its own, after the caller's; the method waits for its end. It may call others.
    """

    @wraps(method)
    def run(self: "FragmentTrainer", *args: Any, **options: Any) -> Any:
        with self._aside():
            return method(self, *args, **options)

    return cast(Method, run)


class FragmentTrainer:
    """What all three have in common: fragments, hooks, the exchange, and rounds."""

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
        self._model, self._tensors = model, fragments_of(model)
        check_covered(inner_optimizer, self._tensors)
        self._inner, self._gate, self._rule, self._about = inner_optimizer, gate, rule, about
        self._on_round = on_round
        self.exchange = exchange
        self.last_report: RoundReport | None = None
        self._held = [self._begin(t) for t in self._tensors]
        self._begun = False  # until then weights that are loaded into the model are where it begins
        self._pending = [PendingUpdates() for _ in self._tensors]
        self._known_as = exchange.trainer  # where it last took part: ranks change with their group
        # By fragment, what could not be completed when its round was: to commit an update, and to write weights
        self._uncommitted: dict[int, Commit] = {}
        self._unwritten: dict[int, ReadPiece] = {}
        self._hook: Any = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Compute inside: see `aside`."""
        with ExitStack() as stack:
            for v in dict.fromkeys(tensors.vectors for tensors in self._tensors):
                stack.enter_context(v.aside())
            yield

    def _finish(self, work: Callable[[], None]) -> None:
        """Do something to its end, whatever interrupts, that must not be left half done: see `core.threads.finish`."""

        def run() -> None:
            with self._aside():
                work()

        with self._aside():  # so that it comes after what this thread has launched, too
            finish(run)

    @aside
    def _begin(self, tensors: FragmentTensors) -> FragmentState:
        """The state of a fragment in which nothing has been learned yet."""
        v, size = tensors.vectors, tensors.size
        shared = SharedState(tensors.layout, tensors.read(), self._rule.first_trend(size, v))
        return FragmentState(shared, v.zeros(size), v.zeros(size) if self._rule.own_momentum else None)

    @property
    def rounds(self) -> list[int]:
        """Rounds that led to each fragment's state."""
        return [held.shared.round for held in self._held]

    @property
    @aside
    def digests(self) -> list[str]:
        """Of each fragment's shared state: equal on all trainers after every round."""
        return [held.shared.digest for held in self._held]

    def shared_weights(self, model: Any = None) -> dict[str, Any]:
        """The weights that all trainers share, by name: publish, evaluate and roll out these.

        A trainer's own model holds what it has learned beyond them, which differs from trainer to trainer. The tensors
        are FP32 and on the device where the fragment's parameters are, in memory of their own; do not write to them.
        The next round replaces them.

        Args:
            model: A module, or a mapping of names to tensors, whose names and buffers to take; what was given to the
                constructor if not given. Its tensors that no fragment trains are returned as they are.

        Raises:
            StateError: several fragments use the same name; give the whole model. Or the model that was given lacks
                tensors that are trained.
        """
        self._prepare()
        known: dict[Place | None, Any] = {}
        for fragment, tensors in enumerate(self._tensors):
            known.update(tensors.views(self._shared_values(fragment)))
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

    @aside
    def _prepare(self) -> None:
        """Complete unfinished commits. Before the first round, take the weights that the model has now as the start."""
        self._mend()
        if not self._begun:
            for held, tensors in zip(self._held, self._tensors, strict=True):  # whose own vectors are zero
                held.shared = replace(held.shared, theta=tensors.read())

    def _shared_values(self, fragment: int) -> Vector:
        return self._held[fragment].shared.theta

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
            with suppress(StoreError):  # the others find out, after their deadline
                self.exchange.leave(self.rounds)

    def _register(self) -> Any:
        return self._inner.register_step_post_hook(lambda *_: self._after_step())

    def _after_step(self) -> None:
        raise NotImplementedError

    @aside
    def rejoin(self, exchange: Exchange | None = None) -> None:
        """Come together with the others, over another exchange if one is given: at the start, and after a failure.

        Shared state is taken from the trainer with the most rounds; residual and momentum are kept. If a round
        that failed here was completed by others, what it took of this trainer's update is known by the payload's id.
        """
        self._prepare()
        self._begun = True
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
        """Put the weights back to where the round began: for steps that came to nothing, or to values not finite."""
        self._prepare()
        for pending in self._pending:
            pending.attempts = 0  # what is discarded is not sent again
        self._unwritten = {fragment: self._start(fragment) for fragment in range(len(self._held))}
        self._finish(self._mend)

    def _start(self, fragment: int) -> ReadPiece:
        """The weights at which this trainer begins the round that it is at."""
        held = self._held[fragment]
        return lambda here: self._rule.start(held.shared.theta[here], held.residual[here])

    def _adopt(self, fragment: int, shared: SharedState) -> None:
        """Go on from a shared state that others came to."""
        held = self._held[fragment]
        if shared.digest == held.shared.digest:
            held.shared = shared
            return
        since = {part.payload for part in shared.parts.values() if part.round > held.shared.round}
        if taken := since & self._pending[fragment].by_payload.keys():
            self._finish(partial(self._close_completed, fragment, shared, taken.pop()))
        elif shared.last_round_of(self._known_as) > held.shared.round:
            # A payload that this trainer does not remember: what it left of residual and momentum is not known.
            self._finish(lambda: self._restart(fragment, shared))
        else:
            self._finish(lambda: self._follow(fragment, shared))

    @aside
    def _catch_up(self, fragment: int) -> None:
        """Take part, as a listener, in rounds that were decided without this trainer."""
        while True:
            shared = self._held[fragment].shared
            decided = self.exchange.missed(self._coder(fragment, shared), len(shared.theta))
            if decided is None:
                return
            self._finish(partial(self._listen, fragment, decided.taken, self._resolve(fragment, shared, decided)))

    def _listen(self, fragment: int, taken: SparseVector | None, result: RoundResult) -> None:
        """Go on from a round that others have completed.

        A new trainer begins with the momentum of one whose updates have always been this round's step. With none, what
        trainers that leave take with them would be missing: they all would have to gather momentum first.
        """
        held, payload = self._held[fragment], result.members.get(self.exchange.trainer)
        if payload in self._pending[fragment].by_payload:
            self._close_completed(fragment, result.after, payload)
            return
        before = held.shared.theta
        self._follow(fragment, result.after, None if payload is None else taken)
        if held.new and result.members:
            held.momentum = self._rule.first_momentum(before, result.after.theta)

    @aside
    def _update(self, fragment: int, snapshot: bool = False) -> TrainerUpdate:
        """What this trainer has to tell now; of a snapshot of its weights if it goes on learning meanwhile."""
        held, tensors = self._held[fragment], self._tensors[fragment]
        local = tensors.read_piece if tensors.is_contiguous and not snapshot else tensors.read().__getitem__
        return TrainerUpdate(self._rule, held.shared.theta, held.residual, held.momentum, local)

    def _coder(self, fragment: int, shared: SharedState) -> Coder:
        described = None if self._gate.dense else describe(shared.theta, shared.trend)
        return Coder(fragment, shared.round + 1, shared.digest, described, self._tensors[fragment].vectors)

    @contextmanager
    def _declining(self, fragment: int, shared: SharedState) -> Iterator[None]:
        """Tell the others that this trainer has nothing to propose, if that fails inside: nobody waits for it."""
        try:
            yield
        except Exception as e:
            vectors = self._tensors[fragment].vectors
            coder = Coder(fragment, shared.round + 1, shared.digest, None, vectors)
            self.exchange.decline(coder, len(shared.theta), f"{type(e).__name__}: {e}")
            raise

    @aside
    def _select(self, fragment: int, update: Update) -> SentUpdate:
        """The part of an update to send. Raises: StateError, after the others were told, if it is not finite."""
        shared = self._held[fragment].shared
        with self._declining(fragment, shared):
            self._tensors[fragment].check_place()
            part = self._gate.select(shared.theta, update)
        if not np.isfinite(part.largest):
            name = self._tensors[fragment].name_of(_first_beyond(update, LARGEST_FINITE, shared.theta) or 0)
            self.exchange.decline(self._coder(fragment, shared), update.size, f"an update of {name} is not finite")
            raise StateError(
                f"the update of {name!r} is not finite, so nothing was sent. Call discard() to return to the weights "
                "at the beginning of the round",
                tensor=name,
            )
        return part

    @aside
    def _meet(self, fragment: int, shared: SharedState, part: SentUpdate) -> ExchangedRound:
        """Exchange and compute; changes nothing but what is pending."""
        exchange = self.exchange
        sent, received = exchange.sent_bytes, exchange.received_bytes
        with self._declining(fragment, shared):
            coder = self._coder(fragment, shared)
            part = self._pending[fragment].choose(part)
            letter = exchange.prepare(coder, part)
        self._pending[fragment].add(letter.id, part)
        decided = exchange.propose(coder, letter, len(shared.theta))
        coder = replace(coder, described=None)  # 2 bytes a weight that are not needed any more
        result = self._resolve(fragment, shared, decided)
        exchange.confirm(coder, decided, result.after)
        passed = exchange.sent_bytes - sent, exchange.received_bytes - received
        return ExchangedRound(part, result, decided.taken, *passed)

    def _resolve(self, fragment: int, shared: SharedState, decided: Outcome) -> RoundResult:
        result = shared.resolve(decided, self._rule)
        if not result.members:
            trend = "stays" if result.after.trend is shared.trend else "is reset to zero"
            logger.warning(
                "Round %d of fragment %d is empty for all trainers: the updates of %s yield values that are too "
                "large. The shared weights are unchanged; the shared momentum or trend %s.",
                result.after.round,
                fragment,
                ", ".join(decided.members),
                trend,
            )
        return result

    # What a round leaves behind. All of these run inside `finish`.

    def _close(
        self,
        fragment: int,
        update: TrainerUpdate,
        shared: SharedState,
        taken: SparseVector | None,
        blend: float = 0.0,
    ) -> None:
        """Go on from a round in which this trainer offered an update, of which this was taken."""
        self._uncommitted[fragment] = Commit(update, taken, shared, blend)
        self._mend()

    def _blended(self, fragment: int, commit: Commit) -> ReadPiece:
        """The weights of the next round, with a share of those that this trainer has now."""
        update, shared, blend = commit.update, commit.shared, commit.blend
        now = self._tensors[fragment].read()

        def blended(here: slice) -> Vector:
            start = self._rule.start(shared.theta[here], update.residual[here])
            return start + blend * (now[here] - start)

        return blended

    def _close_completed(self, fragment: int, shared: SharedState, payload: str) -> None:
        """Go on from a round that others have completed, in which a payload of this trainer was taken."""
        update = self._update(fragment)
        if _first_beyond(update, LARGEST_UPDATE, shared.theta) is None:
            self._close(fragment, update, shared, self._pending[fragment].by_payload[payload].sent)
        else:
            self._drop(fragment, update, shared)

    def _follow(self, fragment: int, shared: SharedState, cleared: SparseVector | None = None) -> None:
        """Go on from shared weights that this trainer did not help to make; what it has learned since is kept.

        Entries that an earlier life of this trainer has sent are cleared: they were told, and what that life left of
        them is not known.
        """
        held, rule = self._held[fragment], self._rule
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused when it is proposed
            moved = rule.start(held.shared.theta, held.residual) - self._tensors[fragment].read()
            if cleared is not None:
                for own in (held.residual, held.momentum, moved):
                    if own is not None:
                        own[slice(None) if cleared.is_whole else cleared.positions] = 0
            self._set(fragment, shared, (rule.start(shared.theta, held.residual) - moved).__getitem__)

    def _restart(self, fragment: int, shared: SharedState) -> None:
        """Go on from shared weights, with nothing of this trainer's own."""
        self._held[fragment].clear()
        self._set(fragment, shared)

    def _drop(self, fragment: int, update: TrainerUpdate, shared: SharedState) -> None:
        """Drop an update that has diverged: kept, it would make later rounds empty."""
        at = _first_beyond(update, LARGEST_UPDATE, shared.theta) or 0
        logger.error(
            "Trainer %s has diverged: its update of %r has a value of %g, and at most %g is accepted. The update is "
            "dropped; this trainer resumes from the shared weights.",
            self.exchange.trainer,
            self._tensors[fragment].name_of(at),
            float(update.read(slice(at, at + 1))[0]),
            LARGEST_UPDATE,
        )
        self._restart(fragment, shared)

    def _set(self, fragment: int, shared: SharedState, weights: ReadPiece | None = None) -> None:
        """Go on from shared weights and, if none are given, from the weights at which a round begins there."""
        self._held[fragment].shared, self._pending[fragment] = shared, PendingUpdates()
        self._unwritten[fragment] = weights or self._start(fragment)
        self._mend()

    def _mend(self) -> None:
        """Complete rounds that are decided. If that fails (a device may), it is done at the next occasion."""
        if self._uncommitted or self._unwritten:  # most steps have nothing to wait for
            self._complete()

    @aside
    def _complete(self) -> None:
        for fragment in list(self._uncommitted):
            commit = self._uncommitted[fragment]
            weights = self._blended(fragment, commit) if commit.blend else None
            commit.update.commit(commit.taken)
            self._held[fragment].new = False
            del self._uncommitted[fragment]
            self._set(fragment, commit.shared, weights)
        for fragment in list(self._unwritten):
            self._tensors[fragment].write(self._unwritten[fragment])
            del self._unwritten[fragment]

    def _report(self, fragment: int, met: ExchangedRound, began: float) -> None:
        members = met.result.members
        shared = self._held[fragment].shared  # of a trainer that was late, further than the round
        self.last_report = RoundReport(
            fragment,
            shared.round,
            self.exchange.trainer in members,
            tuple(members),
            len(met.part.sent.positions),
            met.part.sent.size,
            met.result.moved,
            met.sent_bytes,
            met.received_bytes,
            shared.digest,
            perf_counter() - began,
        )
        self._note_round(self.last_report)
        if self._on_round is not None:
            self._on_round(self.last_report)

    def _note_round(self, report: RoundReport) -> None:
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
            emit(
                RoundCompleted(
                    fragment=report.fragment,
                    round=report.round,
                    took_part=report.took_part,
                    members=len(report.members),
                    sent=report.sent,
                    total=report.total,
                    sent_bytes=report.sent_bytes,
                    received_bytes=report.received_bytes,
                    seconds=report.seconds,
                )
            )

    @contextmanager
    def _noting_failure(self, fragment: int) -> Iterator[None]:
        """Emit that the next round of a fragment failed, if it does inside. It is not logged: the caller has the error.

        A trainer that was away for so long that it must rejoin has not failed: it does so.
        """
        round_ = self._held[fragment].shared.round + 1
        try:
            yield
        except MissingLinkError:
            raise
        except Exception as e:
            if has_listeners():
                emit(RoundFailed(fragment=fragment, round=round_, error=describe_error(e)))
            raise

    @aside
    def state_dict(self) -> dict[str, Any]:
        """Everything to go on from, as tensors and numbers: `shared`, which a peer may be given, and `private`.

        The tensors are in host memory.
        """
        import torch

        self._prepare()

        def tensor(values: Vector) -> Any:
            return torch.from_numpy(vectors_of(values).fetch(values).copy())

        shared = [
            {
                "layout": h.shared.layout,
                "round": h.shared.round,
                "theta": tensor(h.shared.theta),
                "trend": tensor(h.shared.trend),
                "parts": {k: list(v) for k, v in h.shared.parts.items()},
            }
            for h in self._held
        ]
        private = {
            "trainer": self.exchange.trainer,
            "residuals": [tensor(h.residual) for h in self._held],
            "momenta": [tensor(h.momentum) for h in self._held if h.momentum is not None],
            "new": [h.new for h in self._held],
            "weights": [tensor(t.read()) for t in self._tensors],
        }
        return {"format": FORMAT, "shared": shared, "private": private}

    @aside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; the model's weights are set to those it had then.

        Its tensors may be in host memory or on a device, wherever this trainer's parameters are.

        Without `private`, or with that of another trainer, they are the shared ones; residual and momentum are zero.

        Raises:
            StateError: it is of another model, has other fragments, or was saved by another kind of trainer.
        """
        if state.get("format") != FORMAT:
            raise StateError(
                f"expected a saved state of format {FORMAT}, but found {state.get('format')!r}: it is not a "
                "state_dict() of this version. Resume from the model's weights instead, without load_state_dict()"
            )
        if [s["layout"] for s in state["shared"]] != [t.layout for t in self._tensors]:
            raise StateError(
                "the saved state is of another model, or of other fragments; load it into the model that saved it"
            )
        private = state.get("private") or {}
        own = private if private.get("trainer") == self.exchange.trainer else None
        try:
            read = [self._read_saved(i, saved, own) for i, saved in enumerate(state["shared"])]
        except (KeyError, IndexError, FormatError) as e:
            raise StateError(
                f"the saved state does not fit {type(self).__name__}: {e}. Load it with the class that saved it, or "
                "resume from the model's weights instead, without load_state_dict()"
            ) from e
        self._held, self._uncommitted = [held for held, _ in read], {}
        self._pending = [PendingUpdates() for _ in read]
        self._unwritten = {i: weights.__getitem__ for i, (_, weights) in enumerate(read)}
        self._known_as = private.get("trainer", self.exchange.trainer)
        self._begun = True
        self._mend()

    def _read_saved(
        self, i: int, saved: Mapping[str, Any], own: Mapping[str, Any] | None
    ) -> tuple[FragmentState, Vector]:
        """The state of a fragment and the model's weights, as they were saved."""
        tensors, v, size = self._tensors[i], self._tensors[i].vectors, self._tensors[i].size
        parts = {name: read_part(part) for name, part in saved["parts"].items()}
        trend = read_trend(saved["trend"].cpu().numpy(), self._rule.first_trend(size, v))
        shared = SharedState(saved["layout"], tensors.vector(saved["theta"]), trend, int(saved["round"]), parts)
        if own is None:
            return FragmentState(
                shared, v.zeros(size), v.zeros(size) if self._rule.own_momentum else None
            ), shared.theta
        momentum = tensors.vector(own["momenta"][i]) if self._rule.own_momentum else None
        held = FragmentState(shared, tensors.vector(own["residuals"][i]), momentum, bool(own["new"][i]))
        return held, tensors.vector(own["weights"][i])


def _first_beyond(update: Update, limit: np.float32, like: Vector) -> int | None:
    """The first entry of an update whose magnitude is not within a limit, if there is one; like: a vector beside it."""
    v = vectors_of(like)
    for begin in range(0, update.size, v.chunk):
        here = slice(begin, min(begin + v.chunk, update.size))
        if (found := v.first_beyond(update.read(here), limit)) is not None:
            return begin + found
    return None
