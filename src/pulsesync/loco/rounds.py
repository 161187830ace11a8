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
from pulsesync.loco.outer_step import LARGEST_UPDATE, OuterRule, TrainerUpdate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, RoundResult, SharedState, read_part, read_trend
from pulsesync.loco.vectors import Vector, vectors_of

logger = logging.getLogger(__name__)

FORMAT = "pulse-loco-trainer/1"  # of what state_dict() returns
LARGEST_FINITE = np.finfo(np.float32).max
Method = TypeVar("Method", bound=Callable[..., Any])
MOST_ATTEMPTS = 8  # at a round, each with a new update: more would fill the memory


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


@dataclass(eq=False)
class FragmentState:
    """A fragment's state: the shared part and this trainer's own part. Changed at once, when a round is committed.

    The shared state is replaced; residual and momentum, which no other object refers to, are written in place.
    """

    shared: SharedState
    residual: Vector
    momentum: Vector | None  # None where the outer momentum is shared
    new: bool = True  # whether this trainer has no state of its own: it has sent no update yet, or was cleared

    def clear(self) -> None:
        """Clear this trainer's own state."""
        self.new = True
        for own in (self.residual, self.momentum):
            if own is not None:
                own[:] = 0


@dataclass(frozen=True, eq=False)
class ExchangedRound:
    """A round that was exchanged and computed, but is not committed yet."""

    part: SentUpdate  # what this trainer has sent
    result: RoundResult
    taken: SparseVector | None  # the update of a trainer with this name in the round, if the exchange has it
    sent_bytes: int
    received_bytes: int


class Commit(NamedTuple):
    """What to do after a round that contains this trainer's update: all of it, even if something fails in between."""

    update: TrainerUpdate
    taken: SparseVector | None
    shared: SharedState
    blend: float  # the share of this trainer's own weights that is kept


@dataclass
class PendingUpdates:
    """The updates that a trainer has sent since its last round.

    A round may contain one of them although it raised an error.
    """

    by_payload: dict[str, SentUpdate] = field(default_factory=dict)
    attempts: int = 0  # with new updates, since the round began or steps were discarded

    def choose(self, part: SentUpdate) -> SentUpdate:
        """Return the update to send: this one, or after many attempts the last one again.

        Later progress is in the weights, and is part of the next round.
        """
        if self.attempts < MOST_ATTEMPTS:
            return part
        return replace(next(reversed(self.by_payload.values())), largest=part.largest)

    def add(self, payload: str, part: SentUpdate) -> None:
        self.attempts += payload not in self.by_payload
        self.by_payload.pop(payload, None)  # so that it becomes the last entry
        self.by_payload[payload] = part

    def sent(self, payload: str, read: SparseVector | None) -> SparseVector | None:
        """The content of a payload: as it was sent or, if the trainer sent it before a restart, as it was read."""
        return self.by_payload[payload].sent if payload in self.by_payload else read


def aside(method: Method) -> Method:
    """Run a method on the fragments' device, in order with what the caller launches there before and after it.

    On a GPU it runs in a separate stream, after the caller's; the method waits for its end. Such methods may call each
    other.
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
        self._current = [self._begin(t) for t in self._tensors]
        self._begun = False  # until then, weights that are loaded into the model are the start
        self._pending = [PendingUpdates() for _ in self._tensors]
        self._known_as = exchange.trainer  # in the last round it took part in: ranks change with their group
        # By fragment, unfinished work of its last round: committing an update, and writing weights
        self._uncommitted: dict[int, Commit] = {}
        self._unwritten: dict[int, ReadPiece] = {}
        self._hook: Any = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """A context to compute in: see `aside`."""
        with ExitStack() as stack:
            for v in dict.fromkeys(tensors.vectors for tensors in self._tensors):
                stack.enter_context(v.aside())
            yield

    def _finish(self, work: Callable[[], None]) -> None:
        """Complete work that must not be left half done, even if interrupted: see `core.threads.finish`."""

        def run() -> None:
            with self._aside():
                work()

        with self._aside():  # so that it also comes after what this thread has launched
            finish(run)

    @aside
    def _begin(self, tensors: FragmentTensors) -> FragmentState:
        """The state of a fragment before the first round."""
        v, size = tensors.vectors, tensors.size
        shared = SharedState(tensors.layout, tensors.read(), self._rule.first_trend(size, v))
        return FragmentState(shared, v.zeros(size), v.zeros(size) if self._rule.own_momentum else None)

    @property
    def rounds(self) -> list[int]:
        """The number of rounds of each fragment."""
        return [current.shared.round for current in self._current]

    @property
    @aside
    def digests(self) -> list[str]:
        """Of each fragment's shared state: equal on all trainers after every round."""
        return [current.shared.digest for current in self._current]

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
        """Complete unfinished commits. Before the first round, use the current weights of the model as the start."""
        self._complete_pending()
        if not self._begun:
            for current, tensors in zip(self._current, self._tensors, strict=True):  # their own vectors are zero
                current.shared = replace(current.shared, theta=tensors.read())

    def _shared_values(self, fragment: int) -> Vector:
        return self._current[fragment].shared.theta

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

    @aside
    def rejoin(self, exchange: Exchange | None = None) -> None:
        """Join the other trainers, over another exchange if one is given: at the start, and after a failure.

        Shared state is taken from the trainer with the most rounds; residual and momentum are kept. If a round that
        failed for this trainer was completed by others, the payload's id identifies the update that it contains.
        """
        self._prepare()
        self._begun = True
        self.exchange = exchange or self.exchange
        found = self.exchange.join([current.shared for current in self._current], self._about)
        for fragment, shared in enumerate(found):
            self._adopt(fragment, shared)
            try:
                self._catch_up(fragment)
            # A round cannot be applied: the exchange has a later state, or raises an error that says what to do.
            except MissingLinkError:
                self.rejoin()
                return
        self._known_as = self.exchange.trainer

    def discard(self) -> None:
        """Roll the weights back to the beginning of the round, for example after an update that is not finite."""
        self._prepare()
        for pending in self._pending:
            pending.attempts = 0  # discarded steps are not sent again
        self._unwritten = {fragment: self._start(fragment) for fragment in range(len(self._current))}
        self._finish(self._complete_pending)

    def _start(self, fragment: int) -> ReadPiece:
        """The weights at which this trainer begins its current round."""
        current = self._current[fragment]
        return lambda here: self._rule.start(current.shared.theta[here], current.residual[here])

    def _adopt(self, fragment: int, shared: SharedState) -> None:
        """Continue from a shared state of the other trainers."""
        current = self._current[fragment]
        if shared.digest == current.shared.digest:
            current.shared = shared
            return
        since = {part.payload for part in shared.parts.values() if part.round > current.shared.round}
        if taken := since & self._pending[fragment].by_payload.keys():
            self._finish(partial(self._close_completed, fragment, shared, taken.pop()))
        elif shared.last_round_of(self._known_as) > current.shared.round:
            # This trainer does not know the payload, so residual and momentum after it are not known.
            self._finish(lambda: self._restart(fragment, shared))
        else:
            self._finish(lambda: self._follow(fragment, shared))

    @aside
    def _catch_up(self, fragment: int) -> None:
        """Apply rounds that were decided without this trainer."""
        while True:
            shared = self._current[fragment].shared
            decided = self.exchange.missed(self._coder(fragment, shared), len(shared.theta))
            if decided is None:
                return
            self._finish(partial(self._listen, fragment, decided.taken, self._resolve(fragment, shared, decided)))

    def _listen(self, fragment: int, taken: SparseVector | None, result: RoundResult) -> None:
        """Continue from a round that others have completed.

        A new trainer begins with the momentum of a trainer whose updates have always been this round's step. Without
        it, the momentum of trainers that leave would be lost, and every new one would have to build up its own first.
        """
        current, payload = self._current[fragment], result.members.get(self.exchange.trainer)
        if payload in self._pending[fragment].by_payload:
            self._close_completed(fragment, result.after, payload)
            return
        before = current.shared.theta
        self._follow(fragment, result.after, None if payload is None else taken)
        if current.new and result.members:
            current.momentum = self._rule.first_momentum(before, result.after.theta)

    @aside
    def _update(self, fragment: int, snapshot: bool = False) -> TrainerUpdate:
        """The current update of this trainer; of a snapshot of its weights if training continues meanwhile."""
        current, tensors = self._current[fragment], self._tensors[fragment]
        local = tensors.read_piece if tensors.is_contiguous and not snapshot else tensors.read().__getitem__
        return TrainerUpdate(self._rule, current.shared.theta, current.residual, current.momentum, local)

    def _coder(self, fragment: int, shared: SharedState) -> Coder:
        described = None if self._gate.dense else describe(shared.theta, shared.trend)
        return Coder(fragment, shared.round + 1, shared.digest, described, self._tensors[fragment].vectors)

    @contextmanager
    def _declining(self, fragment: int, shared: SharedState) -> Iterator[None]:
        """If the code inside fails, announce that this trainer has no update, so that the others do not wait."""
        try:
            yield
        except Exception as e:
            vectors = self._tensors[fragment].vectors
            coder = Coder(fragment, shared.round + 1, shared.digest, None, vectors)
            self.exchange.decline(coder, len(shared.theta), f"{type(e).__name__}: {e}")
            raise

    @aside
    def _select(self, fragment: int, update: Update) -> SentUpdate:
        """The part of an update to send. Raises: StateError, after notifying the others, if it is not finite."""
        shared = self._current[fragment].shared
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
        """Exchange and compute; changes only the pending updates."""
        exchange = self.exchange
        sent, received = exchange.sent_bytes, exchange.received_bytes
        with self._declining(fragment, shared):
            coder = self._coder(fragment, shared)
            part = self._pending[fragment].choose(part)
            encoded = exchange.prepare(coder, part)
        self._pending[fragment].add(encoded.id, part)
        decided = exchange.propose(coder, encoded, len(shared.theta))
        coder = replace(coder, described=None)  # frees 2 bytes a weight
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

    # After a round. All of these run inside `finish`.

    def _close(
        self,
        fragment: int,
        update: TrainerUpdate,
        shared: SharedState,
        taken: SparseVector | None,
        blend: float = 0.0,
    ) -> None:
        """Continue from a round that contains this part of the trainer's update."""
        self._uncommitted[fragment] = Commit(update, taken, shared, blend)
        self._complete_pending()

    def _blended(self, fragment: int, commit: Commit) -> ReadPiece:
        """The weights of the next round, blended with this trainer's current weights."""
        update, shared, blend = commit.update, commit.shared, commit.blend
        now = self._tensors[fragment].read()

        def blended(here: slice) -> Vector:
            start = self._rule.start(shared.theta[here], update.residual[here])
            return start + blend * (now[here] - start)

        return blended

    def _close_completed(self, fragment: int, shared: SharedState, payload: str) -> None:
        """Continue from a round that others have completed and that contains a payload of this trainer."""
        update = self._update(fragment)
        if _first_beyond(update, LARGEST_UPDATE, shared.theta) is None:
            self._close(fragment, update, shared, self._pending[fragment].by_payload[payload].sent)
        else:
            self._drop(fragment, update, shared)

    def _follow(self, fragment: int, shared: SharedState, cleared: SparseVector | None = None) -> None:
        """Continue from shared weights of a round without this trainer; its progress since then is kept.

        Entries that this trainer sent before a restart are cleared: the others have them, and what remained of them is
        not known.
        """
        current, rule = self._current[fragment], self._rule
        # Values that are not finite are refused when they are proposed.
        with np.errstate(over="ignore", invalid="ignore"):
            moved = rule.start(current.shared.theta, current.residual) - self._tensors[fragment].read()
            if cleared is not None:
                for own in (current.residual, current.momentum, moved):
                    if own is not None:
                        own[slice(None) if cleared.is_whole else cleared.positions] = 0
            self._set(fragment, shared, (rule.start(shared.theta, current.residual) - moved).__getitem__)

    def _restart(self, fragment: int, shared: SharedState) -> None:
        """Continue from shared weights, without this trainer's own state."""
        self._current[fragment].clear()
        self._set(fragment, shared)

    def _drop(self, fragment: int, update: TrainerUpdate, shared: SharedState) -> None:
        """Drop an update that has diverged: if it were kept, later rounds would be empty."""
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
        """Continue from shared weights; the model gets the given weights, or those at which the round begins."""
        self._current[fragment].shared, self._pending[fragment] = shared, PendingUpdates()
        self._unwritten[fragment] = weights or self._start(fragment)
        self._complete_pending()

    def _complete_pending(self) -> None:
        """Complete decided rounds. If that fails, as a device may, it is tried again at the next step."""
        if self._uncommitted or self._unwritten:  # most steps have nothing to complete
            self._complete()

    @aside
    def _complete(self) -> None:
        for fragment in list(self._uncommitted):
            commit = self._uncommitted[fragment]
            weights = self._blended(fragment, commit) if commit.blend else None
            commit.update.commit(commit.taken)
            self._current[fragment].new = False
            del self._uncommitted[fragment]
            self._set(fragment, commit.shared, weights)
        for fragment in list(self._unwritten):
            self._tensors[fragment].write(self._unwritten[fragment])
            del self._unwritten[fragment]

    def _report(self, fragment: int, met: ExchangedRound, began: float) -> None:
        members = met.result.members
        shared = self._current[fragment].shared  # for a late trainer, newer than the round
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
            emit(RoundCompleted.of(report, members=len(report.members)))

    @contextmanager
    def _noting_failure(self, fragment: int) -> Iterator[None]:
        """Emit that the next round of a fragment failed, if it does inside. It is not logged: the caller has the error.

        A trainer that was away for so long that it must rejoin has not failed: it does so.
        """
        round_ = self._current[fragment].shared.round + 1
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
        """Everything to resume from, as tensors and numbers: `shared`, which may be given to a peer, and `private`.

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
            for h in self._current
        ]
        private = {
            "trainer": self.exchange.trainer,
            "residuals": [tensor(h.residual) for h in self._current],
            "momenta": [tensor(h.momentum) for h in self._current if h.momentum is not None],
            "new": [h.new for h in self._current],
            "weights": [tensor(t.read()) for t in self._tensors],
        }
        return {"format": FORMAT, "shared": shared, "private": private}

    @aside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; the model's weights are set to those in it.

        Its tensors may be in host memory or on a device, independent of this trainer's parameters.

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
        self._current, self._uncommitted = [current for current, _ in read], {}
        self._pending = [PendingUpdates() for _ in read]
        self._unwritten = {i: weights.__getitem__ for i, (_, weights) in enumerate(read)}
        self._known_as = private.get("trainer", self.exchange.trainer)
        self._begun = True
        self._complete_pending()

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
        current = FragmentState(shared, tensors.vector(own["residuals"][i]), momentum, bool(own["new"][i]))
        return current, tensors.vector(own["weights"][i])


def _first_beyond(update: Update, limit: np.float32, like: Vector) -> int | None:
    """The first entry of an update whose magnitude is not within a limit, if there is one.

    like: a vector on the same device.
    """
    v = vectors_of(like)
    for begin in range(0, update.size, v.chunk):
        here = slice(begin, min(begin + v.chunk, update.size))
        if (found := v.first_beyond(update.read(here), limit)) is not None:
            return begin + found
    return None
