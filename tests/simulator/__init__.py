"""A simulated run by a seed: trainers, teams of them, workers, a squasher and prunes, over a store with faults.

    RunSimulator(seed=7, events=60).run()

The real Publisher, ShardedPublisher, Subscriber, Squasher and prune act on one store. Each process has its own
connection (a line), which loses, repeats, delays and damages messages, and lets another process act between two calls;
and the process can die at any call, before or after it took effect. One thread runs at a time: the ranks of a team take
turns. Time is a number, and background work is done when the simulator decides.

What must be true after every event, and at the end, when all faults are gone, is listed in `Invariant`. A schedule in
which one of these is violated raises an InvariantError that names it. A schedule in which something other than a
PulseError is raised ends with a SimulationCrashError. Both have all the events in their message, and the command that
repeats them:

    python -m tests.simulator --seed 7 --events 60
    python -m tests.simulator --seeds 0:1000

To test your own engine or store, pass the class of the subscriber, or a function that makes the store.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pulsesync.store import MemoryStore, Store
from tests.publishers import Publisher, ShardedPublisher
from tests.readers import Subscriber
from tests.simulator.actors import Arrays, Content, SimulatedProcess, SimulatedTrainer, SimulatedWorker, TensorSet, bits
from tests.simulator.checks import check
from tests.simulator.ending import finish
from tests.simulator.events import EVENTS, MEANWHILE
from tests.simulator.executors import InlineExecutor, QueuedExecutor
from tests.simulator.invariants import Invariant, InvariantError, SimulationCrashError, SimulationError, Violation
from tests.simulator.line import BODIES, RECORDS, Crash, Ledger, SimulatedClock, StoreLink
from tests.simulator.trainers import new_trainer
from tests.simulator.workers import WORKERS
from tests.simulator.world import PART_BYTES, Interrupted, World

__all__ = [
    "BODIES",
    "EVENTS",
    "MEANWHILE",
    "PART_BYTES",
    "RECORDS",
    "TEAMS",
    "WORKERS",
    "Arrays",
    "Content",
    "Crash",
    "InlineExecutor",
    "Interrupted",
    "Invariant",
    "InvariantError",
    "Ledger",
    "QueuedExecutor",
    "RunSimulator",
    "SimulatedClock",
    "SimulatedProcess",
    "SimulatedTrainer",
    "SimulatedWorker",
    "SimulationCrashError",
    "SimulationError",
    "SimulationReport",
    "StoreLink",
    "TensorSet",
    "World",
    "bits",
]

TEAMS = 0.2  # of all trainers


@dataclass(frozen=True)
class SimulationReport:
    """The result of a schedule."""

    seed: int
    versions: int
    events: Counter[str]
    faults: Counter[str]


class RunSimulator:
    """One schedule. The same arguments give the same events, and the same result.

    Args:
        seed: Draws the events and the failures.
        events: How many events are drawn.
        trouble: How often something fails: 0 is never, 1 the usual rate.
        teams: How often a trainer is a team of ranks that publish together: 0 is never, 1 always.
        publisher: The class of the publisher.
        sharded: The class of the publishers of a team.
        subscriber: The class of the subscribers.
        store: Makes the store.
    """

    def __init__(
        self,
        seed: int,
        *,
        events: int = 40,
        trouble: float = 1.0,
        teams: float = TEAMS,
        publisher: Callable[..., Publisher] = Publisher,
        sharded: Callable[..., ShardedPublisher] = ShardedPublisher,
        subscriber: Callable[..., Subscriber] = Subscriber,
        store: Callable[[], Store] = MemoryStore,
    ) -> None:
        self.seed, self.events, self.trouble = seed, events, trouble
        self.world = world = World(seed, trouble, teams, publisher, sharded, subscriber, store, MEANWHILE, self._happen)
        self.log, self.counts, self.faults = world.log, world.counts, world.faults
        self.clock, self.truth, self.ledger = world.clock, world.truth, world.ledger
        self.model, self.base, self.key, self.epoch_patches = world.model, world.base, world.key, world.epoch_patches
        self.records, self.contents = world.book.records, world.book.contents  # of every version ever committed

    def run(self) -> SimulationReport:
        """Run the schedule.

        Raises:
            InvariantError: the library did something wrong; SimulationCrashError: it raised something other than a
            PulseError. Both are AssertionErrors.
        """
        world = self.world
        done = 0
        try:
            with world.rules():
                world.trainers.append(new_trainer(world, world.base))
                while done < self.events:
                    self._happen({0: "publish", 3: "join"}.get(done) or self._draw())
                    done += 1
                finish(world)
        except Exception as e:  # noqa: BLE001 - whatever it is, this is the schedule that leads to it
            first = world.failure or e
            raise self._error(first, done) from first
        for line in world.lines:
            self.faults += line.faults
        return SimulationReport(self.seed, len(self.records), self.counts, self.faults)

    def _error(self, failure: Exception, event: int) -> SimulationError:
        if isinstance(failure, Violation):
            return InvariantError(
                failure.invariant, str(failure), seed=self.seed, event=event, command=self._command, log=self.log
            )
        reason = f"{type(failure).__name__}: {failure}"
        return SimulationCrashError(reason, seed=self.seed, event=event, command=self._command, log=self.log)

    @property
    def _command(self) -> str:
        """The command that repeats the schedule."""
        usual = {"trouble": (self.trouble, 1.0), "teams": (self.world.teams, TEAMS)}
        others = [f" --{name} {value:g}" for name, (value, default) in usual.items() if value != default]
        return f"python -m tests.simulator --seed {self.seed} --events {self.events}{''.join(others)}"

    def _draw(self) -> str:
        return self.world.rng.choices(list(EVENTS), [weight for weight, _ in EVENTS.values()])[0]

    def _happen(self, event: str) -> None:
        """Run one event, and check all invariants."""
        world = self.world
        self.counts[event] += 1
        depth = world.indent
        at = len(self.log)
        self.log.append(f"{depth}{event}")
        _, happens = EVENTS[event]
        try:
            outcome = happens(world)
            self.log[at] = f"{depth}{event}: {outcome}" if outcome else f"{depth}{event}"
            check(world)
        except Exception as e:
            world.failure = world.failure or e  # the library may catch it inside another event
            raise
