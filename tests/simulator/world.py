"""The state of a simulation: randomness, time, a store, processes, and faults while they act.

Events change a world and checks read one; this module depends on neither.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn, TypeVar
from unittest import mock

import numpy as np

from pulsesync.core import threads
from pulsesync.errors import PulseError, RunChangedError
from pulsesync.format.history import History
from pulsesync.format.signature import SigningKey
from pulsesync.maintain import point as pointing
from pulsesync.maintain import prune as pruning
from pulsesync.publish import agreement, anchors, commit, intake, publisher, writer
from pulsesync.run import bodies, fetcher
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import Store, cache, memory
from pulsesync.testing.faults import FaultyStore
from tests.publishers import Publisher, ShardedPublisher
from tests.readers import Squasher
from tests.simulator.actors import SimulatedProcess, SimulatedTrainer, SimulatedWorker, TensorSet
from tests.simulator.book import PublishLog
from tests.simulator.executors import InlineExecutor, QueuedExecutor
from tests.simulator.invariants import Invariant, Violation
from tests.simulator.line import Crash, Ledger, SimulatedClock, StoreLink

PART_BYTES = 900  # of weights in one part of an anchor, so that one has several
# Of parts in a record, by the seed: so that none, some or most parts are stored in records.
INLINE_BYTES = (0, 600, 4096)

T = TypeVar("T")


class Interrupted(BaseException):
    """The writing of weights was interrupted half-way."""


class World:
    """The state of a schedule. All random choices are drawn from the seed, in the order of the calls.

    meanwhile: events that may happen during an action. happen: runs an event, by its name.
    """

    def __init__(
        self,
        seed: int,
        trouble: float,
        teams: float,
        make_publisher: Callable[..., Publisher],
        make_sharded: Callable[..., ShardedPublisher],
        make_subscriber: Callable[..., Subscriber],
        make_store: Callable[[], Store],
        meanwhile: Sequence[str],
        happen: Callable[[str], None],
    ) -> None:
        self.seed, self.trouble, self.teams = seed, trouble, teams
        self.make_publisher, self.make_sharded, self.make_subscriber = make_publisher, make_sharded, make_subscriber
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()  # of events
        self.faults: Counter[str] = Counter()
        self.failure: Exception | None = None  # the first failure; the library may have caught it
        self.rng, self.noise = random.Random(seed), np.random.default_rng(seed)
        self.clock = SimulatedClock()
        self.truth = make_store()
        self.model = TensorSet.draw(self.rng)
        self.base = self.model.content(self.model.arbitrary(self.noise))
        self.key = SigningKey(f"{self.rng.getrandbits(256):064x}") if self.rng.random() < 0.5 else None
        self.epoch_patches = self.rng.choice([2, 3, 4])
        self.book = PublishLog(self.truth, self.model, self.trust, self.epoch_patches, self.note, self.fail)
        self.ledger = Ledger(self.truth, self.book.add_version, self.fail)
        self.replayed: dict[str, History | None] = {}  # records that were checked, and the history after each
        self.trainers: list[SimulatedTrainer] = []
        self.workers: list[SimulatedWorker] = []
        self.squasher: tuple[SimulatedProcess, Squasher] | None = None
        self.busy: list[SimulatedProcess] = []  # those in the middle of an action
        self.lines: list[StoreLink] = []
        self._meanwhile, self._happen = meanwhile, happen
        self._names: Counter[str] = Counter()
        self._folder = Path()

    @contextmanager
    def rules(self) -> Iterator[None]:
        """Anchors in many parts, one thread, and no randomness or time except the simulator's own."""
        fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
        words = random.Random(self.seed)
        chance = SimpleNamespace(token_hex=lambda n: f"{words.getrandbits(8 * n):0{2 * n}x}")
        times = SimpleNamespace(time=self.clock, monotonic=self.clock, perf_counter=self.clock)
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-simulator-", dir=fast)))
            for where, name, value in (
                (anchors, "PART_BYTES", PART_BYTES),
                (bodies, "INLINE_BYTES", INLINE_BYTES[self.seed % len(INLINE_BYTES)]),
                (threads, "default_threads", lambda: 1),
                (anchors, "ThreadPoolExecutor", lambda *_, **__: InlineExecutor()),
                (bodies, "ThreadPoolExecutor", lambda *_, **__: InlineExecutor()),
                (fetcher, "ThreadPoolExecutor", lambda *_, **__: InlineExecutor()),
                (tempfile, "tempdir", str(self._folder)),
                (intake, "time", times),
                (publisher, "time", times),
                (writer, "time", times),
                (memory, "time", times),
                (anchors, "time", times),
                (agreement, "CALL_TIMEOUT_S", 0.0),  # a rank that has not made a call makes none while others wait
                (commit, "time", times),
                (commit, "secrets", chance),
                (memory, "time", times),
                (pointing, "time", times),
                (pruning, "secrets", chance),
                (cache, "_ASK_AGAIN_S", 0.0),  # after a failure a cache waits by a real clock
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    @property
    def trust(self) -> str | None:
        return self.key.public if self.key else None

    @property
    def indent(self) -> str:
        """The indentation of a line of the log: one level for each process in the middle of an action."""
        return "  " * len(self.busy)

    def note(self, text: str) -> None:
        """Log a line inside an event."""
        self.log.append(f"{self.indent}({text})")

    def fail(self, invariant: Invariant, reason: str) -> NoReturn:
        """End the schedule, because an invariant is violated.

        This may be called within a call of the library, which may catch the error: so it is kept, and the next check
        raises it again.
        """
        violation = Violation(invariant, reason)
        self.failure = self.failure or violation
        raise violation

    def new_line(self) -> StoreLink:
        line = StoreLink(self.ledger, random.Random(self.rng.getrandbits(32)))
        self.lines.append(line)
        return line

    def new_name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind} {self._names[kind]}"

    def new_folder(self, kind: str) -> Path:
        return self._folder / self.new_name(kind).replace(" ", "-")

    def pick(self, of: Sequence[T]) -> T | None:
        """Draw a process that is idle; None if there is none."""
        idle = [one for one in of if one not in self.busy]
        return self.rng.choice(idle) if idle else None

    def act(self, process: SimulatedProcess, work: Callable[[], T], describe: Callable[[T], str] = str) -> str:
        """Run an action of a process over a line with faults."""
        for line in process.lines:
            self._stir(line)
        self.busy.append(process)
        at = len(self.log)
        self.note(f"{process.name} begins")
        try:
            outcome = describe(work())
        except Crash:
            outcome = "dies"
        except Interrupted:
            outcome = "is interrupted"
        except RunChangedError as e:
            self.fail(Invariant.SAME_RUN, f"{process.name} takes the run for another one: {e}")
        except PulseError as e:
            outcome = f"{type(e).__name__}: {e}"
        finally:
            self.busy.pop()
            for line in process.lines:
                self._settle_faults(line)
        if len(self.log) == at + 1:
            self.log.pop()  # nothing happened in between
        if any(line.dead for line in process.lines):
            outcome += "; is dead"
            self.bury(process)
        return f"{process.name} {outcome}"

    def _stir(self, line: StoreLink) -> None:
        """Draw the faults until the process is done."""
        line.calm()
        if self.rng.random() < 0.4 * self.trouble:
            chances = {kind: self.rng.choice([0.0, 0.0, 0.02, 0.1]) for kind in ("lost", "unanswered", "truncated")}
            flipped, doubled = self.rng.choice([0.0, 0.0, 0.03]), self.rng.choice([0.0, 0.2])
            rng = random.Random(self.rng.getrandbits(32))
            line.checked = FaultyStore(self.ledger, rng, **chances, flipped=flipped, doubled=doubled)
            # in an unsigned pointer, a wrong digit is not detected
            line.weather = FaultyStore(self.ledger, rng, **chances, flipped=flipped if self.key else 0.0)
            line.late = self.rng.choice([0.0, 0.0, 0.1])
            line.missed = self.rng.choice([0.0, 0.0, 0.02, 0.1])
        line.stale = self.rng.choice([0.0, 0.0, 0.5]) * min(self.trouble, 1.0)
        if self.rng.random() < 0.12 * self.trouble:
            line.crash(self.rng.randint(1, self.rng.choice([6, 40])), self.rng.choice(["before", "after"]))
        if len(self.busy) < 2 and self.rng.random() < 0.2 * self.trouble:
            event = self.rng.choice(self._meanwhile)
            line.interrupt(self.rng.randint(1, self.rng.choice([6, 40])), lambda: self._happen(event))

    def _settle_faults(self, line: StoreLink) -> None:
        for store in (line.weather, line.checked):
            if isinstance(store, FaultyStore):
                self.faults += store.faults
        line.calm()

    def bury(self, process: SimulatedProcess) -> None:
        """Release the publisher, subscriber or squasher of a process that has died."""
        if isinstance(process, SimulatedTrainer):
            process.publisher = None
            process.executor = QueuedExecutor()
            process.futures.clear()
        elif isinstance(process, SimulatedWorker):
            process.subscriber = None
        elif self.squasher and self.squasher[0] is process:
            self.squasher = None
