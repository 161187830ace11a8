"""The events of a simulated run: actions of trainers and workers, squashes, prunes, and the passing of time."""

from collections.abc import Callable

from pulsesync.maintain.prune import PruneReport, prune
from pulsesync.store import Store
from tests.readers import Squasher
from tests.simulator import pointers, trainers, workers
from tests.simulator.actors import SimulatedProcess
from tests.simulator.invariants import Invariant
from tests.simulator.world import World


def on_squash(world: World) -> str:
    if world.squasher and world.squasher[0] in world.busy:
        return "is running"
    if world.squasher and world.rng.random() < 0.2:
        world.squasher = None  # begins again
    if world.squasher is None:
        line = world.new_line()
        end = Squasher(line, signing_key=world.key, trust=world.trust, epoch_patches=world.epoch_patches)
        world.squasher = SimulatedProcess(world.new_name("squasher"), line), end
    process, squasher = world.squasher
    return world.act(process, squasher.run, lambda done: f"writes {[(s.level, s.number) for s in done]}")


def on_prune(world: World) -> str:
    world.ledger.arrive()  # no write is delayed for as long as a version is kept
    process = SimulatedProcess(world.new_name("prune"), world.new_line())
    keep, hours = world.rng.choice([1, 2, 5, 20]), world.rng.choice([0.0, 0.0, 0.5, 3.0])
    grace = world.rng.choice([0.0, 0.5, 2.0])
    before, named = world.book.joinable(), pointers.named_versions(world)
    made = len(world.book.records)
    outcome = world.act(process, lambda: prune_with(world, process.line, keep, hours, grace), describe_prune)
    rooted = any(record.base is None for record in world.book.records[made:])
    if before and not rooted and not world.book.joinable():
        world.fail(Invariant.PATH_TO_NEWEST, f"no path is left after a prune: {outcome}")
    pointers.check_pruned(world, named)
    return f"keep {keep}, {hours} h, grace {grace} h: {outcome}"


def prune_with(world: World, line: Store, keep: int, hours: float, grace: float) -> PruneReport:
    trust = {world.trust} if world.trust else None
    return prune(line, keep_versions=keep, keep_hours=hours, grace_hours=grace, trust=trust)


def describe_prune(report: PruneReport) -> str:
    return f"keeps from {report.kept_from}, takes out {report.versions} versions, deletes {report.bodies} bodies"


def on_time_passes(world: World) -> str:
    minutes = world.rng.choice([1, 10, 60, 300, 3000])
    if world.busy:
        minutes = min(minutes, 60)  # no publish takes a day, after which a prune would delete its objects
    world.clock.now_s += minutes * 60
    return f"{minutes} min"


def on_late_writes_arrive(world: World) -> str:
    count = len(world.ledger.late)
    world.ledger.arrive()
    return str(count)


# The relative frequency of each event; and its function, whose result is logged
EVENTS: dict[str, tuple[int, Callable[[World], str]]] = {
    "train": (8, trainers.on_train),
    "publish": (10, trainers.on_publish),
    "publish in the background": (8, trainers.on_publish_in_background),
    "background work": (8, trainers.on_background_work),
    "roll back to a checkpoint": (1, trainers.on_roll_back_to_a_checkpoint),
    "restart the trainer": (2, trainers.on_restart_the_trainer),
    "a second trainer": (1, trainers.on_a_second_trainer),
    "join": (3, workers.on_join),
    "sync": (10, workers.on_sync),
    "sync to a version": (3, workers.on_sync_to_a_version),
    "restart a worker": (2, workers.on_restart_a_worker),
    "resume a worker": (3, workers.on_resume_a_worker),
    "leave": (1, workers.on_leave),
    "damage a worker": (2, workers.on_damage_a_worker),
    "interrupt a write": (2, workers.on_interrupt_a_write),
    "move a pointer": (4, pointers.on_move_a_pointer),
    "squash": (4, on_squash),
    "prune": (2, on_prune),
    "time passes": (2, on_time_passes),
    "late writes arrive": (2, on_late_writes_arrive),
}
# Events that may happen during another one
MEANWHILE = (
    "publish",
    "publish in the background",
    "sync",
    "squash",
    "move a pointer",
    "prune",
    "prune",
    "train",
    "time passes",
    "late writes arrive",
)
