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
reaches the newest version, and that joining costs no more records than docs/protocol.md says.

A schedule that breaks one of these raises an AssertionError with all its events, and the command that repeats it:

    python -m pulsesync.testing.simulator --seed 7 --events 60
    python -m pulsesync.testing.simulator --seeds 0:1000

To try an engine or a store of your own, give the class of the worker's end, or a function that makes the store.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pulsesync.publish.publisher import Publisher
from pulsesync.run.subscriber import Subscriber
from pulsesync.store import MemoryStore, Store
from pulsesync.testing.simulator.actors import (
    Arrays,
    Content,
    SimulatedProcess,
    SimulatedTrainer,
    SimulatedWorker,
    TensorSet,
    bits,
)
from pulsesync.testing.simulator.checks import check
from pulsesync.testing.simulator.ending import finish
from pulsesync.testing.simulator.events import EVENTS, MEANWHILE
from pulsesync.testing.simulator.executors import InlineExecutor, QueuedExecutor
from pulsesync.testing.simulator.line import BODIES, RECORDS, Crash, Ledger, SimulatedClock, StoreLink
from pulsesync.testing.simulator.trainers import new_trainer
from pulsesync.testing.simulator.workers import WORKERS
from pulsesync.testing.simulator.world import PART_BYTES, Interrupted, World

__all__ = [
    "BODIES",
    "EVENTS",
    "MEANWHILE",
    "PART_BYTES",
    "RECORDS",
    "WORKERS",
    "Arrays",
    "Content",
    "Crash",
    "InlineExecutor",
    "Interrupted",
    "Ledger",
    "QueuedExecutor",
    "RunSimulator",
    "SimulatedClock",
    "SimulatedProcess",
    "SimulatedTrainer",
    "SimulatedWorker",
    "SimulationReport",
    "StoreLink",
    "TensorSet",
    "World",
    "bits",
]  # fmt: skip


@dataclass(frozen=True)
class SimulationReport:
    """What a schedule came to."""

    seed: int
    versions: int
    events: Counter[str]
    faults: Counter[str]


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
        store: Callable[[SimulatedClock], Store] = MemoryStore,
    ) -> None:
        self.seed, self.events, self.trouble = seed, events, trouble
        self.world = world = World(seed, trouble, publisher, subscriber, store, MEANWHILE, self._happen)
        self.log, self.counts, self.faults = world.log, world.counts, world.faults
        self.clock, self.truth, self.ledger = world.clock, world.truth, world.ledger
        self.model, self.base, self.key, self.epoch_patches = world.model, world.base, world.key, world.epoch_patches
        self.records, self.contents = world.book.records, world.book.contents  # of every version that ever was

    def run(self) -> SimulationReport:
        """Let it all happen. Raises: AssertionError, with the events and the command that repeats them."""
        world = self.world
        try:
            with world.rules():
                world.trainers.append(new_trainer(world, world.base))
                for number in range(self.events):
                    self._happen({0: "publish", 3: "join"}.get(number) or self._draw())
                finish(world)
        except Exception as e:  # whatever it is, this is the schedule that leads to it
            reason = f"{type(e).__name__}: {e}" if not isinstance(e, AssertionError) else str(e)
            lines = "\n".join(self.log)
            command = f"python -m pulsesync.testing.simulator --seed {self.seed} --events {self.events}"
            raise AssertionError(f"seed {self.seed}: {reason}\n\n{lines}\n\nTo repeat it: {command}") from e
        for line in world.lines:
            self.faults += line.faults
        return SimulationReport(self.seed, len(self.records), self.counts, self.faults)

    def _draw(self) -> str:
        return self.world.rng.choices(list(EVENTS), [weight for weight, _ in EVENTS.values()])[0]

    def _happen(self, event: str) -> None:
        """Let one event happen, and look whether all is well."""
        world = self.world
        self.counts[event] += 1
        depth = world.indent
        at = len(self.log)
        self.log.append("")
        _, happens = EVENTS[event]
        outcome = happens(world)
        self.log[at] = f"{depth}{event}: {outcome}" if outcome else f"{depth}{event}"
        check(world)
