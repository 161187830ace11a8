"""A trainer that is several processes: each rank has shards of one state, and all publish it as one version.

The ranks of a team are threads, of which exactly one runs at a time: a rank runs until it waits in a gather, returns or
dies, and which one runs next is drawn from the seed. So a schedule with teams is as repeatable as one without.
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from pulsesync.errors import GroupError, PulseError
from pulsesync.publish.pending import PublishReport
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slice
from tests.publishers import ShardedPublisher
from tests.simulator.executors import QueuedExecutor
from tests.simulator.invariants import Fail, Invariant
from tests.simulator.line import Crash, StoreLink

GATHERS = 100  # at most, in one call of a team; a publish takes about ten
TURN_S = 60.0  # at most, until a rank waits in a gather or ends; a turn takes milliseconds

T = TypeVar("T")


@dataclass(frozen=True)
class Sharding:
    """Which part of each tensor each rank has."""

    size: int
    parts: Mapping[str, Sequence[Slice | None]]  # by rank; None: it does not have the tensor, not even its name
    alias: str | None  # a second name of the tensor "embed"

    @classmethod
    def draw(cls, rng: random.Random, shapes: Mapping[str, tuple[int, ...]], alias: str | None) -> "Sharding":
        size = rng.choice([2, 2, 3])
        return cls(size, {name: _draw_parts(rng, shape, size) for name, shape in shapes.items()}, alias)

    def shards(self, weights: Mapping[str, Any], rank: int) -> dict[str, Any]:
        """What a rank publishes: its parts of the weights, in the same memory."""
        out: dict[str, Any] = {}
        for name, parts in self.parts.items():
            part, array = parts[rank], weights[name]
            if part == Slice():
                out[name] = array
            elif part is not None:
                local = array[slice(*part.rows)] if part.rows else array
                local = local[:, slice(*part.columns)] if part.columns else local
                out[name] = Placed(local, array.shape, part.rows, part.columns)
        if self.alias and "embed" in out:
            out[self.alias] = out["embed"]
        return out


def _draw_parts(rng: random.Random, shape: tuple[int, ...], size: int) -> list[Slice | None]:
    kind = rng.choice(["rows", "rows", "columns", "replicated", "one rank"])
    if kind == "one rank":
        owner, nothing = rng.randrange(size), rng.choice([None, Slice((0, 0))])
        return [Slice() if rank == owner else nothing for rank in range(size)]
    if kind == "replicated" or (kind == "columns" and len(shape) < 2):
        return [Slice()] * size
    length = shape[0 if kind == "rows" else 1]
    # Otherwise the first ranks have more, and the last perhaps nothing.
    even, piece = rng.random() < 0.5, -(-length // size)
    cuts = [length * rank // size if even else min(length, piece * rank) for rank in range(size + 1)]
    return [Slice(rows=span) if kind == "rows" else Slice(columns=span) for span in pairwise(cuts)]


class SimulatedGroup:
    """Connects the ranks of a team. It also runs them: one at a time, in an order that is drawn.

    A gather ends when all ranks wait in one. If a rank has ended or died, those that wait get a GroupError, as they do
    over gloo, and then the group can mostly no longer be used.
    """

    def __init__(self, size: int, rng: random.Random) -> None:
        self.size = size
        self.broken = False
        self._rng = rng
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._turn_is_over = threading.Semaphore(0)
        self._notes: dict[int, tuple[bytes, bool]] = {}  # of the waiting ranks; and whether they miss the answer
        self._answers: dict[int, list[bytes] | None] = {}

    def run(self, works: Sequence[Callable[[], T]]) -> "list[Future[T]]":
        """Run the work of every rank, each in its own thread; return how each ended.

        Raises:
            AssertionError: the ranks do not end.
        """
        outcomes: list[Future[T]] = [Future() for _ in works]

        def run_rank(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                outcomes[rank].set_result(works[rank]())
            except BaseException as e:  # noqa: BLE001 - for the caller
                outcomes[rank].set_exception(e)
            self._turn_is_over.release()

        ready, gathers = list(range(self.size)), 0
        for rank in ready:
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True).start()
        while ready:
            rank = ready.pop(self._rng.randrange(len(ready)))
            self._turns[rank].release()
            if not self._turn_is_over.acquire(timeout=TURN_S):
                raise AssertionError(f"rank {rank} has neither ended nor reached a gather within {TURN_S:g} s")
            if not ready and self._notes:
                gathers += 1
                if gathers > GATHERS:
                    raise AssertionError(f"the ranks have made {GATHERS} gathers in one call, which does not end")
                ready = self._answer()
        return outcomes

    def _answer(self) -> list[int]:
        """Answer the waiting ranks, which are all that have not ended; return them."""
        notes, self._notes = self._notes, {}
        complete = [notes[rank][0] for rank in range(self.size)] if len(notes) == self.size else None
        self._answers = {rank: None if misses else complete for rank, (_, misses) in notes.items()}
        if None in self._answers.values() and self._rng.random() < 0.7:
            self.broken = True
        return sorted(notes)

    def gather(self, rank: int, note: bytes, misses: bool) -> list[bytes]:
        """Wait for the notes of all ranks. misses: this rank gets an error instead, although it has sent its own."""
        if not self.broken:
            self._notes[rank] = note, misses
            self._turn_is_over.release()
            self._turns[rank].acquire()
            if (answer := self._answers[rank]) is not None:
                return list(answer)
        raise GroupError(f"rank {rank} lost the other ranks, on purpose", rank=rank)


class GroupMember:
    """One rank of a group, as a `Team`. A gather is a call on the rank's line: the process can die there, too."""

    def __init__(self, group: SimulatedGroup, rank: int, line: StoreLink) -> None:
        self.rank, self.size = rank, group.size
        self._group, self._line = group, line

    def gather(self, note: bytes) -> list[bytes]:
        misses = self._line.misses()
        return self._line.call(lambda: self._group.gather(self.rank, note, misses))


class SimulatedPublisher:
    """The publishers of all ranks as one: to the rest of the simulator, a team is a trainer with a publisher.

    make: makes the publisher of a rank, given its store and its team. lines: of the ranks. note: logs a line. fail:
    called if an invariant is violated.
    """

    def __init__(
        self,
        make: Callable[..., ShardedPublisher],
        sharding: Sharding,
        lines: Sequence[StoreLink],
        rng: random.Random,
        note: Callable[[str], None],
        fail: Fail,
    ) -> None:
        self.group = SimulatedGroup(sharding.size, rng)
        self.executors = [QueuedExecutor() for _ in lines]
        self.ranks = [
            make(line, GroupMember(self.group, rank, line), executor=executor)
            for rank, (line, executor) in enumerate(zip(lines, self.executors, strict=True))
        ]
        self._sharding, self._lines, self._note, self._fail = sharding, lines, note, fail
        self._calls: list[list[Future[PublishReport]]] = []  # that are not completed, by rank

    @property
    def version(self) -> int | None:
        """The last version that a rank knows to be committed."""
        return max((rank.version for rank in self.ranks if rank.version is not None), default=None)

    @property
    def waiting(self) -> int:
        return sum(executor.waiting for executor in self.executors)

    def publish(self, weights: Mapping[str, Any], *, step: int, now: bool = False) -> PublishReport:
        """Publish on all ranks. If a rank reports a version, that report is returned: others may have died after it.

        Raises:
            Crash: a rank died; PulseError: no rank reports a version.
        """

        def publish(rank: int) -> PublishReport:
            with self.executors[rank].at_once():
                return self.ranks[rank].publish(self._sharding.shards(weights, rank), step=step, now=now)

        outcomes = self._agreed(self._run(publish))
        report, known = _first(outcomes), {(rank.version, rank.digest, rank.run) for rank in self.ranks}
        if report.version is not None and len(known) > 1 and not any(outcome.exception() for outcome in outcomes):
            self._fail(Invariant.PUBLISH_REPORT, f"the ranks report version {report.version}, and are at {known}")
        return report

    def publish_in_background(self, weights: Mapping[str, Any], *, step: int) -> "list[Future[PublishReport]]":
        """Make all ranks compare; return their futures. Raises: Crash, PulseError, if a rank does."""
        outcomes = self._run(
            lambda rank: self.ranks[rank].publish(self._sharding.shards(weights, rank), step=step, wait=False)
        )
        futures = [outcome.result() for outcome in outcomes if not outcome.exception()]
        if len(futures) < len(outcomes):
            raise min((error for outcome in outcomes if (error := outcome.exception())), key=_importance)
        self._calls.append(futures)
        return futures

    def work(self) -> int:
        """Run all waiting tasks of all ranks; return their number."""
        count = self.waiting
        for outcome in self._run(lambda rank: self.executors[rank].run_all()):
            outcome.result()
        return count

    def flush(self) -> None:
        def flush(rank: int) -> None:
            with self.executors[rank].at_once():
                self.ranks[rank].flush()

        for outcome in self._run(flush):
            outcome.result()

    def _run(self, work: Callable[[int], T]) -> "list[Future[T]]":
        """Run all ranks until they have ended. If the group is lost, a launcher kills the remaining ranks."""
        outcomes = self.group.run([partial(work, rank) for rank in range(self.group.size)])
        for rank, outcome in enumerate(outcomes):
            if (error := outcome.exception()) is not None:
                self._note(f"rank {rank}: {type(error).__name__}: {error}")
        if self.group.broken or any(line.dead for line in self._lines):
            for line in self._lines:
                line.dead = True
        for futures in self._calls:
            if all(future.done() for future in futures):
                self._agreed(futures)
        self._calls = [futures for futures in self._calls if not all(future.done() for future in futures)]
        return outcomes

    def _agreed(self, outcomes: "Sequence[Future[PublishReport]]") -> "Sequence[Future[PublishReport]]":
        """Check that the ranks report the same for one call, and that errors name only ranks that failed."""
        errors = [error for outcome in outcomes if (error := outcome.exception())]
        reports = [outcome.result() for outcome in outcomes if not outcome.exception()]
        for error in errors:
            if not isinstance(error, PulseError | Crash):
                raise error
            if reports and not isinstance(error, GroupError | Crash):
                self._fail(Invariant.PUBLISH_REPORT, f"a rank reports {reports[0]}, and another one raises {error!r}")
            if (named := _failed_rank(error)) is not None and _failed_rank(outcomes[named].exception()) is not None:
                self._fail(Invariant.PUBLISH_REPORT, f"{error!r} names rank {named}, which did not fail")
        if len({(one.version, one.step, one.changed, one.total) for one in reports}) > 1:
            self._fail(Invariant.PUBLISH_REPORT, f"the ranks report different versions: {reports}")
        return outcomes


def _first(outcomes: "Sequence[Future[T]]") -> T:
    """The result of a rank; if there is none, the error of the rank that failed, rather than an error that names it."""
    for outcome in outcomes:
        if not outcome.exception():
            return outcome.result()
    raise min((error for outcome in outcomes if (error := outcome.exception())), key=_importance)


def _importance(error: BaseException) -> tuple[bool, bool]:
    return isinstance(error, GroupError), _failed_rank(error) is not None


def _failed_rank(error: BaseException | None) -> int | None:
    """The rank that an error names; None for that rank's own error."""
    return error.failed_rank if isinstance(error, PulseError) else None
