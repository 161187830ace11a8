"""A whole run in one thread, by a seed: trainers, workers, a squasher and prunes, over a store where things go wrong.

    RunSimulator(seed=7, events=60).run()

The real Publisher, Subscriber, Squasher and prune act on one store, each by a line of its own that loses, repeats,
delays and damages what goes over it, that lets somebody else act between two calls, and on which a process can die at
any call, before or after it took effect. Time is a number, and work in the background is done when the simulator says.

After every event it is checked that
- the weights of every worker are, bit for bit, those of the version it reports, whatever was raised meanwhile;
- versions are consecutive, each follows from the one before, and its digest is that of weights a trainer published;
- no record or body is ever overwritten with other bytes, and a prune leaves a way to the newest version;
- nothing but a PulseError was raised;
and at the end, with all faults gone, that the run can be taken up, squashed, joined and pruned, that every worker
reaches the newest version, and that joining costs no more records than docs/PROTOCOL.md says.

A schedule that breaks one of these raises an AssertionError with all its events, and the command that repeats it:

    python -m pulsesync.testing.simulator --seed 7 --events 60
    python -m pulsesync.testing.simulator --seeds 0:1000

To try an engine or a store of your own, give the class of the worker's end, or a function that makes the store.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import ml_dtypes
import numpy as np

from pulsesync import anchors, chain, parallel, publisher
from pulsesync import prune as pruning
from pulsesync.errors import AnotherPublisherError, ConflictError, PulseError, StoreError, VerificationError
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Kind, Manifest
from pulsesync.format.signature import SigningKey
from pulsesync.prune import PruneReport, prune
from pulsesync.publisher import Publisher, PublishReport
from pulsesync.squash import Squasher
from pulsesync.state import Body, State
from pulsesync.store import Entry, MemoryStore, Store
from pulsesync.subscriber import Subscriber, SyncReport
from pulsesync.tensors import view_bits
from pulsesync.testing.faults import FaultyStore
from pulsesync.testing.updates import mutate, random_bits

Arrays = dict[str, np.ndarray[Any, Any]]
Content = dict[str, bytes]  # of every tensor, by canonical name
T = TypeVar("T")

RECORDS = ("manifests/", "anchors/", "squashes/")
BODIES = ("parts/", "layouts/", "files/")
WORKERS = 4  # at most, at a time
PART_BYTES = 900  # of weights in one part of an anchor, so that one has several


class Crash(BaseException):
    """The process in which this is raised is no more."""


class Interrupted(BaseException):
    """Somebody stopped the writing of weights half-way."""


# Executors


class InlineExecutor(Executor):
    """Does everything at once, in the caller's thread."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = Future()
        _run(future, lambda: fn(*args, **kwargs))
        return future


class QueuedExecutor(Executor):
    """Does nothing until it is told to: what is behind waits for `run_one`, in whichever order suits a schedule."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._at_once = False

    @property
    def waiting(self) -> int:
        """How many tasks wait. Not __len__: an executor that has nothing to do would be false."""
        return len(self._waiting)

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> "Future[T]":
        future: Future[T] = _Awaited(self._run_now)
        self._waiting.append((future, lambda: _run(future, lambda: fn(*args, **kwargs))))
        if self._at_once:
            self.run_all()
        return future

    def run_one(self, number: int = 0) -> None:
        """Do one of the tasks that wait, counted from the oldest."""
        _, task = self._waiting[number]
        del self._waiting[number]
        task()

    def _run_now(self, future: "Future[Any]") -> None:
        waiting = [one for one, _ in self._waiting]
        assert future in waiting, "a task waits for itself, or for one that waits for it"
        self.run_one(waiting.index(future))

    def run_all(self) -> None:
        while self._waiting:
            self.run_one()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Do what waits, and inside the block everything as it comes: for a caller who waits for it."""
        self.run_all()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False


class _Awaited(Future[T]):
    """A future whose task is done, at the latest, when somebody waits for it."""

    def __init__(self, run_now: "Callable[[Future[Any]], None]") -> None:
        super().__init__()
        self._run_now = run_now

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._run_now(self)
        return super().result(timeout)


def _run(future: "Future[T]", work: Callable[[], T]) -> None:
    try:
        future.set_result(work())
    except Crash:
        raise  # all threads of a process die together
    except BaseException as e:  # noqa: BLE001 - for whoever holds the future
        future.set_exception(e)


# The store, and the ways to it


class Clock:
    """Seconds, that pass when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Ledger:
    """The store as it is. Sees that nothing is overwritten that must not be, and tells of versions that come to be."""

    def __init__(self, store: Store, on_version: Callable[[bytes], None]) -> None:
        self.store = store
        self.heads: list[bytes] = []  # all that head has ever said
        self.late: list[Callable[[], None]] = []  # writes that have not arrived yet
        self._on_version = on_version
        self._bodies: dict[str, bytes] = {}

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        return self.store.get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        assert not key.startswith(RECORDS), f"{key} is put, and could overwrite one that is there"
        if key.startswith(BODIES):
            assert self._bodies.setdefault(key, bytes(data)) == bytes(data), f"{key} gets another content"
        self.store.put(key, data)
        if key == chain.HEAD:
            self.heads.append(bytes(data))

    def create(self, key: str, data: bytes) -> None:
        self.store.create(key, data)
        if key.startswith("manifests/"):
            self._on_version(data)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self.store.delete(key)

    def arrive(self) -> None:
        """Let writes that were held up arrive; one that was to create what is there by now comes too late."""
        late, self.late = self.late, []
        for write in late:
            with suppress(ConflictError):
                write()


class Line:
    """The way of one process to the store: it goes through `weather`, and ends with the process."""

    def __init__(self, ledger: Ledger, rng: random.Random) -> None:
        self.ledger = ledger
        self.weather: Store = ledger  # for records and hints
        self.bodies: Store = ledger  # for everything else
        self.stale = self.late = 0.0
        self.dead = False
        self.calls = 0
        self.faults: Counter[str] = Counter()
        self._rng = rng
        self._alarms: dict[int, tuple[str, Callable[[], None]]] = {}

    def calm(self) -> None:
        """From now on nothing goes wrong."""
        self.weather = self.bodies = self.ledger
        self.stale = self.late = 0.0
        self._alarms.clear()

    def crash(self, calls: int, when: str) -> None:
        """Let the process die at a call from now, "before" or "after" it took effect."""
        self._alarms[self.calls + calls] = when, self._die

    def interrupt(self, calls: int, event: Callable[[], None]) -> None:
        """Let something else happen just before a call from now."""
        self._alarms[self.calls + calls] = "before", event

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        if key == chain.HEAD and self.ledger.heads and self._rng.random() < self.stale:
            self.faults["stale"] += 1
            old = self._rng.choice(self.ledger.heads)
            return self._call(lambda: old[begin:end])
        return self._call(lambda: self._by(key).get(key, begin, end))

    def put(self, key: str, data: bytes | memoryview) -> None:
        copy = bytes(data)
        self._write(lambda store: store.put(key, copy), key)

    def create(self, key: str, data: bytes) -> None:
        self._write(lambda store: store.create(key, data), key)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._call(lambda: self.weather.list(prefix))

    def delete(self, key: str) -> None:
        self._call(lambda: self.weather.delete(key))

    def _write(self, write: Callable[[Store], None], key: str) -> None:
        if self._rng.random() < self.late and not self.dead:
            self.faults["late"] += 1
            self.ledger.late.append(lambda: write(self.ledger))
            raise StoreError(f"no answer about {key}, on purpose", key=key, retryable=True)
        self._call(lambda: write(self._by(key)))

    def _by(self, key: str) -> Store:
        return self.bodies if key.startswith(BODIES) else self.weather

    def _call(self, call: Callable[[], T]) -> T:
        if self.dead:
            raise Crash
        self.calls += 1
        when, event = self._alarms.pop(self.calls, ("", None))
        if event and when == "before":
            event()
        result = call()
        if event and when == "after":
            event()
        return result

    def _die(self) -> None:
        self.dead = True
        self.faults["crash"] += 1
        raise Crash


# Who takes part


@dataclass
class Model:
    """Which tensors the run has."""

    arrays: dict[str, tuple[Any, tuple[int, ...]]]  # dtype and shape
    alias: str | None  # a second name of the first tensor
    layout: Layout  # uncut: digests are the same for every grid

    @classmethod
    def draw(cls, rng: random.Random) -> "Model":
        dtypes = [ml_dtypes.bfloat16, ml_dtypes.bfloat16, np.float32, np.uint8]
        sizes = [(rng.randint(4, 20), rng.randint(4, 40)) for _ in range(rng.randint(1, 3))]
        names = ["embed", "layers.0.weight", "layers.1.weight"]
        arrays: dict[str, tuple[Any, tuple[int, ...]]] = {
            name: (rng.choice(dtypes), shape) for name, shape in zip(names, sizes, strict=False)
        }
        arrays["norm"] = rng.choice(dtypes), (rng.choice([1, 7, 64, 300]),)
        alias = rng.choice([None, "lm_head"])
        plain = {name: np.zeros(shape, dtype) for name, (dtype, shape) in arrays.items()}
        layout = layouts.make(view.spec for view in view_bits(plain)[0].values())
        return cls(arrays, alias, layout)

    def new(self, content: Content | None = None, alias: str = "shared") -> Arrays:
        """Tensors with a content, or zeros; the alias "shared" with its tensor, a "copy" of it, or "absent"."""
        out = {name: np.zeros(shape, dtype) for name, (dtype, shape) in self.arrays.items()}
        self.fill(out, content or {})
        if self.alias and alias != "absent":
            out[self.alias] = out["embed"] if alias == "shared" else out["embed"].copy()
        return out

    def fill(self, arrays: Arrays, content: Content) -> None:
        for name, data in content.items():
            bits(arrays[name])[...] = np.frombuffer(data, bits(arrays[name]).dtype)

    def content(self, arrays: Arrays) -> Content:
        return {name: arrays[name].tobytes() for name in self.arrays}

    def digest(self, arrays: Arrays) -> str:
        return State.attach({name: arrays[name] for name in self.arrays}, self.layout).digest


def bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array's own memory as flat unsigned integers."""
    return array.reshape(-1).view(f"u{array.itemsize}")


@dataclass(eq=False)
class Process:
    """Somebody who uses the store."""

    name: str
    line: Line


@dataclass(eq=False)
class Trainer(Process):
    """Weights that change, and the publisher that publishes them, if it lives."""

    weights: Arrays
    spool: Path
    options: dict[str, Any]
    executor: QueuedExecutor = field(default_factory=QueuedExecutor)
    publisher: Publisher | None = None
    step: int = 0
    saved: list[tuple[int, Content]] = field(default_factory=list)  # the trainer's own checkpoints
    futures: list[tuple["Future[PublishReport]", int]] = field(default_factory=list)
    version: int = -1  # that the publisher reported last


@dataclass(eq=False)
class Worker(Process):
    """Weights that follow, and the subscriber that lets them, if it lives."""

    weights: Arrays
    last: Content  # what they were when they were last looked at
    cache: Path | None
    subscriber: Subscriber | None = None
    saved: tuple[int, bytes, Content] | None = None  # version, history and weights, written down for a restart
    damaged: bool = False


@dataclass(frozen=True)
class SimulationReport:
    """What a schedule came to."""

    seed: int
    versions: int
    events: Counter[str]
    faults: Counter[str]


# How often an event comes, beside the others
EVENTS = {
    "train": 8, "publish": 10, "publish behind": 8, "work behind": 8, "go back to a checkpoint": 1,
    "restart the trainer": 2, "a second trainer": 1,
    "join": 3, "sync": 10, "sync to a version": 3, "restart a worker": 2, "resume a worker": 3, "leave": 1,
    "damage a worker": 1, "interrupt a write": 2,
    "squash": 4, "prune": 2, "time passes": 2, "late writes arrive": 2,
}  # fmt: skip
MEANWHILE = (
    "publish", "publish behind", "sync", "squash", "prune", "prune", "train", "time passes", "late writes arrive",
)  # fmt: skip


class RunSimulator:
    """One schedule. The same arguments give the same events, and the same result.

    events: how many are drawn. trouble: how often something goes wrong; 0 is a fair day, 1 the usual. publisher,
    subscriber: the classes of the two ends. store: makes the store, given a clock in seconds.
    """

    def __init__(
        self,
        seed: int,
        *,
        events: int = 40,
        trouble: float = 1.0,
        publisher: Callable[..., Publisher] = Publisher,
        subscriber: Callable[..., Subscriber] = Subscriber,
        store: Callable[[Clock], Store] = MemoryStore,
    ) -> None:
        self.seed, self.events, self.trouble = seed, events, trouble
        self.log: list[str] = []
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self._publisher, self._subscriber = publisher, subscriber
        self._rng, self._bits = random.Random(seed), np.random.default_rng(seed)
        self.clock = Clock()
        self.truth = store(self.clock)
        self.ledger = Ledger(self.truth, self._on_version)
        self.model = Model.draw(self._rng)
        self.base = self.model.content(self._arbitrary())
        self.key = SigningKey(f"{self._rng.getrandbits(256):064x}") if self._rng.random() < 0.5 else None
        self.epoch_patches = self._rng.choice([2, 3, 4])
        self.records: list[Manifest] = []  # every version that ever was
        self.contents: list[Content] = []
        self._published: dict[str, list[tuple[int, int, Content]]] = {}  # digest -> number of the call, step, weights
        self._ordinals: list[int] = []  # of each version: the last call that can have led to it
        self._calls = 0
        self._trainers: list[Trainer] = []
        self._workers: list[Worker] = []
        self._squasher: tuple[Process, Squasher] | None = None
        self._busy: list[Process | None] = []  # those in the middle of something
        self._names: Counter[str] = Counter()
        self._parsed: dict[bytes, Manifest] = {}
        self._lines: list[Line] = []
        self._folder = Path()

    def run(self) -> SimulationReport:
        """Let it all happen. Raises: AssertionError, with the events and the command that repeats them."""
        try:
            with self._world():
                self._trainers.append(self._new_trainer(self.base))
                for number in range(self.events):
                    self._happen({0: "publish", 3: "join"}.get(number) or self._draw())
                self._finish()
        except Exception as e:  # whatever it is, this is the schedule that leads to it
            reason = f"{type(e).__name__}: {e}" if not isinstance(e, AssertionError) else str(e)
            lines = "\n".join(self.log)
            command = f"python -m pulsesync.testing.simulator --seed {self.seed} --events {self.events}"
            raise AssertionError(f"seed {self.seed}: {reason}\n\n{lines}\n\nTo repeat it: {command}") from e
        for line in self._lines:
            self.faults += line.faults
        return SimulationReport(self.seed, len(self.records), self.counts, self.faults)

    @contextmanager
    def _world(self) -> Iterator[None]:
        """Short epochs, anchors in many parts, one thread, no chance and no time but the simulator's own."""
        fast = "/dev/shm" if Path("/dev/shm").is_dir() else None
        words = random.Random(self.seed)
        chance = SimpleNamespace(token_hex=lambda n: f"{words.getrandbits(8 * n):0{2 * n}x}")
        times = SimpleNamespace(time=self.clock, monotonic=self.clock, perf_counter=self.clock)
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pulse-simulator-", dir=fast)))
            for where, name, value in (
                (chain, "EPOCH_PATCHES", self.epoch_patches),
                (anchors, "PART_BYTES", PART_BYTES),
                (parallel, "default_threads", lambda: 1),
                (tempfile, "tempdir", str(self._folder)),
                (publisher, "time", times),
                (publisher, "secrets", chance),
                (pruning, "secrets", chance),
            ):
                stack.enter_context(mock.patch.object(where, name, value))
            yield

    # Events

    def _draw(self) -> str:
        return self._rng.choices(list(EVENTS), list(EVENTS.values()))[0]

    def _happen(self, event: str) -> None:
        """Let one event happen, and look whether all is well."""
        self.counts[event] += 1
        depth = "  " * len(self._busy)
        at = len(self.log)
        self.log.append("")
        outcome = getattr(self, "_on_" + event.replace(" ", "_"))()
        self.log[at] = f"{depth}{event}: {outcome}" if outcome else f"{depth}{event}"
        self._check()

    def _act(self, process: Process, work: Callable[[], T], describe: Callable[[T], str] = str) -> str:
        """Let somebody do something over a line on which things may go wrong."""
        self._stir(process.line)
        self._busy.append(process)
        at = len(self.log)
        self.log.append(f"{'  ' * len(self._busy)}({process.name} begins)")
        try:
            outcome = describe(work())
        except Crash:
            outcome = "dies"
        except Interrupted:
            outcome = "is interrupted"
        except PulseError as e:
            outcome = f"{type(e).__name__}: {e}"
        finally:
            self._busy.pop()
            self._settle_faults(process.line)
        if len(self.log) == at + 1:
            self.log.pop()  # nothing came in between
        if process.line.dead:
            outcome += "; is dead"
            self._bury(process)
        return f"{process.name} {outcome}"

    def _stir(self, line: Line) -> None:
        """Draw what goes wrong until the process is done."""
        line.calm()
        if self._rng.random() < 0.4 * self.trouble:
            chances = {kind: self._rng.choice([0.0, 0.0, 0.02, 0.1]) for kind in ("lost", "unanswered", "truncated")}
            flipped, doubled = self._rng.choice([0.0, 0.0, 0.03]), self._rng.choice([0.0, 0.2])
            rng = random.Random(self._rng.getrandbits(32))
            line.bodies = FaultyStore(self.ledger, rng, **chances, flipped=flipped, doubled=doubled)
            # without a signature nobody can tell that a digit of a record was another one
            line.weather = FaultyStore(self.ledger, rng, **chances, flipped=flipped if self.key else 0.0)
            line.late = self._rng.choice([0.0, 0.0, 0.1])
        line.stale = self._rng.choice([0.0, 0.0, 0.5]) * min(self.trouble, 1.0)
        if self._rng.random() < 0.12 * self.trouble:
            line.crash(self._rng.randint(1, self._rng.choice([6, 40])), self._rng.choice(["before", "after"]))
        if len(self._busy) < 2 and self._rng.random() < 0.2 * self.trouble:
            event = self._rng.choice(MEANWHILE)
            line.interrupt(self._rng.randint(1, self._rng.choice([6, 40])), lambda: self._happen(event))

    def _settle_faults(self, line: Line) -> None:
        for store in (line.weather, line.bodies):
            if isinstance(store, FaultyStore):
                self.faults += store.faults
        line.calm()

    def _bury(self, process: Process) -> None:
        if isinstance(process, Trainer):
            process.publisher = None
            process.executor = QueuedExecutor()
            process.futures.clear()
        elif isinstance(process, Worker):
            process.subscriber = None
        elif self._squasher and self._squasher[0] is process:
            self._squasher = None

    def _line(self) -> Line:
        line = Line(self.ledger, random.Random(self._rng.getrandbits(32)))
        self._lines.append(line)
        return line

    def _name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind} {self._names[kind]}"

    def _pick(self, of: Sequence[T]) -> T | None:
        idle = [one for one in of if one not in self._busy]
        return self._rng.choice(idle) if idle else None

    def _new_folder(self, name: str) -> Path:
        return self._folder / self._name(name).replace(" ", "-")

    @property
    def _trust(self) -> str | None:
        return self.key.public if self.key else None

    # Trainers

    def _new_trainer(self, content: Content) -> Trainer:
        grid = self._rng.choice([None, {"layers.*": (2, 2)}, {"*": (3, 1)}])
        options = {
            "codec": self._rng.choice(["auto", "auto", "history", "context", "gap", "dense"]),
            "grid": grid,
            "min_tile": 1,
            "signing_key": self.key,
            "files": self._rng.choice([None, {"config.json": b"{}"}]),
            "publish_every": self._rng.choice([1, 1, 1, 2, "auto"]),
            "anchor_every": self._rng.choice([0.1, 1.0, 10.0, 100.0]),  # the last: hardly ever
        }
        name = self._name("trainer")
        return Trainer(name, self._line(), self.model.new(content), self._new_folder("spool"), options)

    def _open_publisher(self, trainer: Trainer) -> Publisher:
        if trainer.publisher is None:
            trainer.line, trainer.executor, trainer.version = self._line(), QueuedExecutor(), -1
            trainer.publisher = self._publisher(
                trainer.line, **trainer.options, spool=trainer.spool, executor=trainer.executor
            )
        return trainer.publisher

    def _on_train(self) -> str:
        trainer = self._pick(self._trainers)
        return self._train(trainer) if trainer else "nobody is idle"

    def _train(self, trainer: Trainer) -> str:
        """Move some weights: by a place, mostly the same ones again; or to anything at all; or none."""
        kind = self._rng.choices(["adam", "random", "nothing"], [8, 2, 1])[0]
        for name in self.model.arrays if kind != "nothing" else ():
            flat = bits(trainer.weights[name])
            if kind == "random":
                flat[...] = mutate(self._bits, flat, self._rng.choice([0.02, 0.5]))
            else:
                places = self._bits.integers(0, max(1, flat.size // 8), max(1, flat.size // 100))
                flat[places] += self._bits.choice(np.array([1, 1, -1]).astype(flat.dtype), places.size)
        trainer.step += 1
        if self._rng.random() < 0.2:
            trainer.saved.append((trainer.step, self.model.content(trainer.weights)))
        return f"{trainer.name} to step {trainer.step}, {kind}"

    def _on_go_back_to_a_checkpoint(self) -> str:
        trainer = self._pick([one for one in self._trainers if one.saved])
        if trainer is None:
            return "there is none"
        trainer.step, content = self._rng.choice(trainer.saved)
        self.model.fill(trainer.weights, content)
        return f"{trainer.name} to step {trainer.step}"

    def _on_publish(self) -> str:
        trainer = self._pick(self._trainers)
        if trainer is None:
            return "nobody is idle"
        if self._rng.random() < 0.6:
            self._train(trainer)
        self._open_publisher(trainer)
        return self._act(trainer, lambda: self._publish(trainer))

    def _publish(self, trainer: Trainer, now: bool = False) -> str:
        """Publish and wait for it."""
        end = self._open_publisher(trainer)
        content, ordinal = self._note_call(trainer)
        with trainer.executor.at_once():
            try:
                report = end.publish(trainer.weights, step=trainer.step, now=now)
            except AnotherPublisherError:
                if self._rng.random() < 0.7:  # else it tries again, and gets the same
                    self._bury(trainer)
                raise
        if report.version is None:
            return "folds a step"
        assert report.version == end.version, f"version {report.version} is reported, {end.version} is held"
        assert self.contents[report.version] == content, f"version {report.version} is not what was published"
        assert self._ordinals[report.version] >= ordinal, f"version {report.version} is older than its call"
        return f"makes version {report.version}"

    def _on_publish_behind(self) -> str:
        trainer = self._pick(self._trainers)
        if trainer is None:
            return "nobody is idle"
        if self._rng.random() < 0.6:
            self._train(trainer)
        self._open_publisher(trainer)
        return self._act(trainer, lambda: self._publish_behind(trainer))

    def _publish_behind(self, trainer: Trainer) -> str:
        end = self._open_publisher(trainer)
        _, ordinal = self._note_call(trainer)
        future = end.publish(trainer.weights, step=trainer.step, wait=False)
        trainer.futures.append((future, ordinal))
        return f"hands over step {trainer.step}"

    def _on_work_behind(self) -> str:
        """Let a publisher's threads do some of what they have to; meanwhile the trainer may go on."""
        trainer = self._pick([one for one in self._trainers if one.executor.waiting])
        if trainer is None:
            return self._on_publish_behind()  # so that there is something
        number = self._rng.randrange(trainer.executor.waiting)

        def work() -> str:
            if self._rng.random() < 0.3 * self.trouble:
                trainer.line.interrupt(self._rng.randint(1, 6), lambda: self._go_on(trainer))
            trainer.executor.run_one(number)
            return f"does task {number}"

        return self._act(trainer, work)

    def _go_on(self, trainer: Trainer) -> None:
        """The trainer's thread publishes while those behind are at work."""
        end = trainer.publisher
        if end is None or end._lock._is_owned():  # type: ignore[attr-defined]
            return  # where they hold the lock it would have to wait
        self.log.append(f"{'  ' * len(self._busy)}(meanwhile: {self._train(trainer)})")
        self.counts["publish meanwhile"] += 1
        with suppress(PulseError):
            self._publish_behind(trainer)
        if end._quiet.is_set() and trainer.executor.waiting:  # an anchor is being written, no version: both go on
            trainer.executor.run_one()

    def _note_call(self, trainer: Trainer) -> tuple[Content, int]:
        """Remember what is published, by its digest: that is how a version is known for what it is."""
        self._calls += 1
        content = self.model.content(trainer.weights)
        self._published.setdefault(self.model.digest(trainer.weights), []).append((self._calls, trainer.step, content))
        return content, self._calls

    def _on_restart_the_trainer(self) -> str:
        """A new process, with the weights it had, older ones or others, with its spool or on another machine."""
        trainer = self._pick(self._trainers)
        if trainer is None:
            return "nobody is idle"
        self._bury(trainer)
        trainer.line.dead = True
        kind = self._rng.choice(["the same", "older", "base", "any version's", "other"])
        if kind == "older" and trainer.saved:
            trainer.step, content = self._rng.choice(trainer.saved)
            self.model.fill(trainer.weights, content)
        elif kind == "base":
            self.model.fill(trainer.weights, self.base)
        elif kind == "any version's" and self.contents:
            self.model.fill(trainer.weights, self._rng.choice(self.contents))
        elif kind == "other":
            self._train(trainer)
        else:
            kind = "the same"
        if self._rng.random() < 0.3:
            trainer.spool = self._new_folder("spool")
            return f"{trainer.name} with {kind} weights and a new spool"
        return f"{trainer.name} with {kind} weights"

    def _on_a_second_trainer(self) -> str:
        if len(self._trainers) > 1:
            left = self._pick(self._trainers)
            if left is None:
                return "nobody is idle"
            self._bury(left)
            left.line.dead = True
            self._trainers.remove(left)
            return f"{left.name} is gone"
        first = self._trainers[0]
        self._trainers.append(self._new_trainer(self.model.content(first.weights)))
        self._trainers[-1].step = first.step
        return self._trainers[-1].name

    # Workers

    def _arbitrary(self) -> Arrays:
        arrays = self.model.new()
        for name in self.model.arrays:
            flat = bits(arrays[name])
            flat[...] = random_bits(self._bits, flat.dtype.type, flat.shape)
        return arrays

    def _new_worker(self, content: Content | None) -> Worker:
        weights = self.model.new(content, self._rng.choice(["shared", "copy", "absent"]))
        cache = self._new_folder("cache") if self._rng.random() < 0.4 else None
        worker = Worker(self._name("worker"), self._line(), weights, self.model.content(weights), cache)
        self._open_subscriber(worker)
        return worker

    def _open_subscriber(self, worker: Worker) -> Subscriber:
        if worker.subscriber is None:
            worker.line = self._line()
            worker.subscriber = self._subscriber(
                worker.line, trust=self._trust, cache=worker.cache, undo=self._rng.choice([0, 1, 3]),
                executor=InlineExecutor(),
            )  # fmt: skip
        return worker.subscriber

    def _on_join(self) -> str:
        if len(self._workers) >= WORKERS:
            return "enough are here"
        kind = self._rng.choice(["zeros", "base", "any version", "other weights"])
        content: Content | None = None
        if kind == "base":
            content = self.base
        elif kind == "any version" and self.contents:
            content = self._rng.choice(self.contents)
        elif kind == "other weights":
            content = self.model.content(self._arbitrary())
        worker = self._new_worker(content)
        self._workers.append(worker)
        return f"{worker.name} with {kind}; " + self._act(worker, lambda: self._sync(worker))

    def _on_sync(self) -> str:
        worker = self._pick(self._workers)
        if worker is None:
            return "nobody is idle"
        self._open_subscriber(worker)
        return self._act(worker, lambda: self._sync(worker))

    def _on_sync_to_a_version(self) -> str:
        worker = self._pick(self._workers)
        if worker is None or not self.records:
            return "nobody is idle"
        self._open_subscriber(worker)
        version = self._rng.randrange(max(0, len(self.records) - 8), len(self.records) + 1)
        return self._act(worker, lambda: self._sync(worker, version))

    def _sync(self, worker: Worker, version: int | None = None) -> str:
        end = self._open_subscriber(worker)
        before = end.version
        report = end.sync(worker.weights, version)
        self._check_synced(end, report, version)
        assert version is not None or (report.version or 0) >= (before or 0), f"sync went back from {before}"
        to = "" if version is None else f" (asked for {version})"
        return f"from {before} to {report.version}{to} by {', '.join(report.path) or 'nothing'}"

    def _check_synced(self, end: Subscriber, report: SyncReport, version: int | None) -> None:
        assert report.version == end.version, f"{report.version} is reported, {end.version} is held"
        if report.version is not None:
            assert report.version < len(self.records), f"{report.version} is held, and no such version was ever made"
            assert report.digest == self.records[report.version].digest, f"the digest of {report.version} is another"
            assert version in (None, report.version), f"{version} was asked for, {report.version} is held"

    def _on_restart_a_worker(self) -> str:
        worker = self._pick(self._workers)
        if worker is None:
            return "nobody is idle"
        self._bury(worker)
        worker.line.dead = True
        kind = self._rng.choice(["its weights", "zeros", "base"])
        if kind != "its weights":
            self._refill(worker, self.base if kind == "base" else self.model.content(self.model.new()))
        if worker.cache and self._rng.random() < 0.3:
            shutil.rmtree(worker.cache, ignore_errors=True)
        return f"{worker.name} with {kind}"

    def _refill(self, worker: Worker, content: Content) -> None:
        self.model.fill(worker.weights, content)
        alias = worker.weights.get(self.model.alias or "")
        if alias is not None:
            bits(alias)[...] = bits(worker.weights["embed"])
        worker.last, worker.damaged = content, False

    def _on_resume_a_worker(self) -> str:
        """Write down what is held; or come back with what was written down, which may be long ago."""
        worker = self._pick(self._workers)
        if worker is None:
            return "nobody is idle"
        end = worker.subscriber
        if end and end.version is not None and end.state and (worker.saved is None or self._rng.random() < 0.5):
            worker.saved = end.version, end.state.history.to_bytes(), self.model.content(worker.weights)
            if self._rng.random() < 0.4:
                return f"{worker.name} writes down version {end.version}"
        if worker.saved is None:
            return f"{worker.name} has nothing to resume from"
        version, history, content = worker.saved
        if self._rng.random() < 0.4:
            content = self._rng.choice(self.contents)  # and somebody has loaded other weights
        self._bury(worker)
        self._refill(worker, content)
        again = self._open_subscriber(worker)

        def resume() -> str:
            done = again.resume(worker.weights, version, history if self._rng.random() < 0.9 else None)
            assert done == (again.version == version), f"resume says {done}, and {again.version} is held"
            return f"resumes from {version}: {done}"

        return self._act(worker, resume)

    def _on_damage_a_worker(self) -> str:
        """Somebody else writes to the weights; after a sync, or without one, a recount finds out."""
        worker = self._pick([one for one in self._workers if one.subscriber and one.subscriber.version is not None])
        if worker is None:
            return "nobody is there"
        end = self._open_subscriber(worker)
        flat = bits(worker.weights[self._rng.choice(list(self.model.arrays))])
        flat[self._rng.randrange(flat.size)] ^= 1
        worker.damaged = True

        def find() -> str:
            if self._rng.random() < 0.3:
                self._sync(worker)
            end.verify(worker.weights)
            worker.damaged = False
            return "is well again"

        outcome = self._act(worker, find)
        if worker.subscriber is None or worker.subscriber.version is None:
            worker.last, worker.damaged = self.model.content(worker.weights), False  # nothing is claimed of them
        elif worker.damaged:  # a fault on the line kept it from being found: look again
            with suppress(VerificationError):
                worker.subscriber.verify(worker.weights)
            worker.last, worker.damaged = self.model.content(worker.weights), False
        return outcome

    def _on_interrupt_a_write(self) -> str:
        """A sync that is stopped in the middle of its commit."""
        worker = self._pick(self._workers)
        if worker is None:
            return "nobody is idle"
        self._open_subscriber(worker)
        number = self._rng.randrange(3)
        with _interrupted_commit(worker.weights, number):
            return self._act(worker, lambda: self._sync(worker))

    def _on_leave(self) -> str:
        worker = self._pick(self._workers)
        if worker is None:
            return "nobody is idle"
        self._workers.remove(worker)
        return worker.name

    # Squashes, prunes, time

    def _on_squash(self) -> str:
        if self._squasher and self._squasher[0] in self._busy:
            return "is being done"
        if self._squasher and self._rng.random() < 0.2:
            self._squasher = None  # begins anew
        if self._squasher is None:
            line = self._line()
            end = Squasher(line, signing_key=self.key, trust=self._trust)
            self._squasher = Process(self._name("squasher"), line), end
        process, squasher = self._squasher
        return self._act(process, squasher.run, lambda done: f"writes {[(s.level, s.number) for s in done]}")

    def _on_prune(self) -> str:
        self.ledger.arrive()  # nothing is held up for as long as a version is kept
        process = Process(self._name("prune"), self._line())
        keep, hours = self._rng.choice([1, 2, 5, 20]), self._rng.choice([0.0, 0.0, 0.5, 3.0])
        grace = self._rng.choice([0.0, 0.5, 2.0])
        before = self._joinable()
        made = len(self.records)
        outcome = self._act(process, lambda: self._prune(process.line, keep, hours, grace), _pruned)
        rooted = any(record.base is None for record in self.records[made:])
        assert not before or rooted or self._joinable(), f"no way to the newest version any more: {outcome}"
        return f"keep {keep}, {hours} h, grace {grace} h: {outcome}"

    def _prune(self, line: Store, keep: int, hours: float, grace: float) -> PruneReport:
        trust = {self.key.public} if self.key else None
        return prune(line, keep_versions=keep, keep_hours=hours, grace_hours=grace, trust=trust)

    def _on_time_passes(self) -> str:
        minutes = self._rng.choice([1, 10, 60, 300, 3000])
        self.clock.now_s += minutes * 60
        return f"{minutes} min"

    def _on_late_writes_arrive(self) -> str:
        count = len(self.ledger.late)
        self.ledger.arrive()
        return str(count)

    # What must hold

    def _on_version(self, data: bytes) -> None:
        """A version was committed: it must follow from the one before, and be what some trainer published."""
        record = manifests.parse(data, {self.key.public} if self.key else None)
        version, last = record.version, self.records[-1] if self.records else None
        assert version == len(self.records), f"version {version} is made; the next would be {len(self.records)}"
        if record.base is not None:
            assert last is not None, f"version {version} has a base, and is the first"
            assert (record.base.version, record.base.digest) == (last.version, last.digest), (
                f"version {version} has version {record.base.version} for its base, with another digest, or another one"
            )
            assert (record.epoch, record.index) == chain.position(last), f"version {version} is out of place"
        else:
            assert record.epoch == (last.epoch + 1 if last else 0), f"root {version} is out of place"
        assert last is None or record.run == last.run, f"version {version} is of another run"
        calls = [call for call in self._published.get(record.digest, []) if call[1] == record.step]
        assert calls, f"version {version} is a state that nobody published at step {record.step}"
        self.records.append(record)
        self.contents.append(calls[-1][2])
        self._ordinals.append(calls[-1][0])
        self.log.append(f"{'  ' * len(self._busy)}(version {version}: epoch {record.epoch}, index {record.index})")

    def _check(self) -> None:
        for worker in self._workers:
            self._check_worker(worker)
        for trainer in self._trainers:
            self._check_trainer(trainer)
        there = {entry.key for prefix in BODIES for entry in self.truth.list(prefix)}
        for key, record in self._stored():
            named = [chain.layout_key(record.layout), *(chain.part_key(part.id) for part in record.parts)]
            lacking = [one for one in named if one not in there]
            assert not lacking, f"{key} is there without {lacking[0]}"

    def _check_worker(self, worker: Worker) -> None:
        if worker.damaged:
            return
        version = worker.subscriber.version if worker.subscriber else None
        now = self.model.content(worker.weights)
        if version is not None:
            assert version < len(self.contents), f"{worker.name} holds version {version}, which was never made"
            different = [name for name in now if now[name] != self.contents[version][name]]
            assert not different, f"{worker.name} says it holds version {version}; {different} are other weights"
            alias = worker.weights.get(self.model.alias or "")
            assert alias is None or alias.tobytes() == now["embed"], f"{worker.name} has come untied"
        else:
            assert now == worker.last or now in self.contents, f"the weights of {worker.name} are no version"
        worker.last = now

    def _check_trainer(self, trainer: Trainer) -> None:
        version = trainer.publisher.version if trainer.publisher else None
        if version is not None:
            assert version < len(self.records), f"{trainer.name} says it published {version}, which was never made"
            assert version >= trainer.version, f"the version of {trainer.name} went from {trainer.version} to {version}"
            trainer.version = version
        for future, ordinal in [one for one in trainer.futures if one[0].done()]:
            error = future.exception()
            if error is not None:
                assert isinstance(error, PulseError | Crash), f"a publish raised {error!r}"
            elif (made := future.result().version) is not None:
                assert self._ordinals[made] >= ordinal, f"version {made} is older than a publish that reports it"
        trainer.futures = [one for one in trainer.futures if not one[0].done()]

    def _stored(self) -> Iterator[tuple[str, Manifest]]:
        """All records that are in the store now, by key."""
        for prefix in RECORDS:
            for entry in self.truth.list(prefix):
                data = self.truth.get(entry.key)
                if data not in self._parsed:
                    self._parsed[data] = manifests.parse(data)
                yield entry.key, self._parsed[data]

    def _joinable(self) -> bool:
        """Whether a way leads to the newest version from nothing, by all records that are there."""
        records = [record for _, record in self._stored()]
        reached = {record.version for record in records if record.kind == Kind.ANCHOR}
        for record in sorted(records, key=lambda record: record.version):
            if record.base is not None and record.base.version in reached:
                reached.add(record.version)
        return bool(self.records) and self.records[-1].version in reached

    def _audit(self) -> None:
        """See that anchors and squashed patches lead to their versions, whether somebody went that way or not."""
        for key, record in self._stored():
            if record.kind == Kind.VERSION:
                continue
            layout = layouts.parse(self.truth.get(chain.layout_key(record.layout)))
            parts = [Body.of(self.truth.get(chain.part_key(part.id)), layout, part.id) for part in record.parts]
            arrays = self.model.new(self.contents[record.base.version] if record.base else None, "absent")
            state = State.attach(arrays, layout)
            if record.base is None:
                state.load_whole(parts, state.check_whole(record, parts))
            else:
                state.commit(state.prepare(record, parts))
            assert self.model.content(arrays) == self.contents[record.version], f"{key} is not version {record.version}"

    # The end

    def _finish(self) -> None:
        """With all faults gone: take up the run, squash it, follow it, join it, prune it."""
        self.log.append("the end: nothing goes wrong any more")
        self.trouble = 0.0
        self.ledger.arrive()
        for line in self._lines:
            line.calm()
        self._check()
        trainer = self._rng.choice(self._trainers)
        self._train(trainer)
        self._publish_for_sure(trainer)
        for _ in range(self.epoch_patches):  # an epoch starts, at which an anchor is written if there is none
            if not self._joinable() or self._rng.random() < 0.3:
                self._train(trainer)
                self._publish_for_sure(trainer)
        assert self._joinable(), "an epoch later there still is no way to join"
        self._check()
        process = Process("squasher", self._line())
        if self._squasher:
            process, squasher = self._squasher
        else:
            squasher = Squasher(process.line, signing_key=self.key, trust=self._trust)
        self.log.append(f"squashes {[(s.level, s.number) for s in squasher.run()]}")
        self._audit()
        kept = {entry.key for entry in self.truth.list("manifests/")}
        hints = [head for head in self.ledger.heads if chain.manifest_key(int(head)) in kept]
        self.truth.put(chain.HEAD, self._rng.choice([*hints, b"", b"9999", b"?"]))  # it may lag, or say anything
        for worker in self._workers:
            self._arrive(worker)
        self._join_cheaply()
        if self._rng.random() < 0.5:
            return
        for hours in (5.0, 0.0):
            self.clock.now_s += hours * 3600
            report = self._prune(self._line(), 2, 0.0, 1.0)
            self.log.append(_pruned(report))
            assert self._joinable(), "no way leads to the newest version after a prune"
        self._join_cheaply()
        self._train(trainer)
        self._publish_for_sure(trainer)
        for worker in self._workers:
            self._arrive(worker)

    def _publish_for_sure(self, trainer: Trainer) -> None:
        """Publish; a publisher that finds another's version gives way to a new one, and that must succeed."""
        try:
            outcome = self._publish(trainer, now=True)
        except AnotherPublisherError:
            self._bury(trainer)
            outcome = self._publish(trainer, now=True)
        assert trainer.publisher is not None
        with trainer.executor.at_once(), suppress(StoreError):  # an old anchor's fault: the next one is written
            trainer.publisher.flush()
        self.log.append(f"{trainer.name} {outcome}")

    def _arrive(self, worker: Worker) -> None:
        self._open_subscriber(worker)
        self.log.append(f"{worker.name} {self._sync(worker)}")
        assert worker.subscriber is not None
        newest = self.records[-1]
        assert worker.subscriber.version == newest.version, f"{worker.name} does not reach version {newest.version}"
        assert worker.subscriber.verify(worker.weights) == newest.digest, f"{worker.name} counts another digest"
        self._check_worker(worker)

    def _join_cheaply(self) -> None:
        """A worker with nothing arrives, by an anchor, squashes and the patches of one epoch, asking little."""
        worker = self._new_worker(None)
        end = self._open_subscriber(worker)
        report = end.sync(worker.weights)
        self._check_synced(end, report, None)
        self._check_worker(worker)
        newest = self.records[-1]
        self.log.append(f"{worker.name} joins at {report.version} by {report.path}, {worker.line.calls} calls")
        assert report.version == newest.version, f"a joiner does not reach version {newest.version}"
        kinds = Counter(report.path)
        epochs = newest.epoch + 1
        levels = epochs.bit_length()
        assert kinds["anchor"] <= 1, f"{kinds['anchor']} anchors were fetched"
        assert kinds["patch"] <= self.epoch_patches, f"a joiner takes {kinds['patch']} patches"
        assert kinds["squash"] <= 2 * levels, f"a joiner takes {kinds['squash']} squashes over {epochs} epochs"
        most = 24 + len(report.path) * (2 + levels) + self._parts(newest)
        assert worker.line.calls <= most, f"a joiner asks the store {worker.line.calls} times; {most} are enough"

    def _parts(self, newest: Manifest) -> int:
        """How many parts an anchor has at most, in this model."""
        return 1 + sum(tensor.size * tensor.kind.itemsize for tensor in self.model.layout.tensors) // PART_BYTES + 6


def _pruned(report: PruneReport) -> str:
    return f"keeps from {report.kept_from}, takes out {report.versions} versions, deletes {report.bodies} bodies"


@contextmanager
def _interrupted_commit(weights: Arrays, number: int) -> Iterator[None]:
    """Let the n-th write of a commit to these weights be interrupted, once."""
    commit, write = State.commit, State._write
    left: list[int] = []

    def commit_(state: State, transition: Any) -> Any:
        if state.holds(weights):
            left.append(number)
        try:
            return commit(state, transition)
        finally:
            left.clear()

    def write_(state: State, ordinal: int, change: Any) -> None:
        write(state, ordinal, change)
        if left and left[0] == 0:
            left.clear()
            raise Interrupted
        left[:] = [count - 1 for count in left]

    with mock.patch.object(State, "commit", commit_), mock.patch.object(State, "_write", write_):
        yield


# The command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one schedule, or many; print what happened."""
    parser = argparse.ArgumentParser(prog="python -m pulsesync.testing.simulator", description=main.__doc__)
    parser.add_argument("--seed", type=int, help="one schedule, with all its events")
    parser.add_argument("--seeds", default="0:100", help="many, from:to")
    parser.add_argument("--events", type=int, default=40, help="in a schedule")
    parser.add_argument("--trouble", type=float, default=1.0, help="how often something goes wrong; 1 is the usual")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        simulator = RunSimulator(options.seed, events=options.events, trouble=options.trouble)
        try:
            simulator.run()
        finally:
            _say("\n".join(simulator.log))
        return 0
    first, _, end = options.seeds.partition(":")
    events, faults, failed, versions = Counter[str](), Counter[str](), list[int](), 0
    began = time.perf_counter()
    seeds = range(int(first), int(end))
    for done, seed in enumerate(seeds, 1):
        try:
            report = RunSimulator(seed, events=options.events, trouble=options.trouble).run()
        except AssertionError as e:
            failed.append(seed)
            _say(str(e) if not options.keep_going else str(e).partition("\n")[0])
            if not options.keep_going:
                break
        else:
            events, faults, versions = events + report.events, faults + report.faults, versions + report.versions
        if done % 100 == 0 or done == len(seeds):
            each_ms = (time.perf_counter() - began) / done * 1000
            _say(f"{done} schedules, {events.total()} events, {faults.total()} faults, {each_ms:.0f} ms each")
    _say(f"{versions} versions\nevents: {_table(events)}\nfaults: {_table(faults)}\nfailed: {failed or 'none'}")
    return 1 if failed else 0


def _table(counts: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.most_common())


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
