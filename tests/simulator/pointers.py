"""Pointers in a simulated run: an operator moves them, and a prune must keep their versions."""

from pulsesync.run import keys
from tests.readers import move_pointer
from tests.simulator.actors import SimulatedProcess
from tests.simulator.checks import moves_of
from tests.simulator.invariants import Invariant
from tests.simulator.line import POINTERS
from tests.simulator.world import World

NAMES = ("stable", "canary")


def on_move_a_pointer(world: World) -> str:
    """An operator moves a pointer to a version, mostly one of the last, which may be older than the one before."""
    if not world.book.records:
        return "there is no version"
    operator = SimulatedProcess(world.new_name("operator"), world.new_line())
    name, newest = world.rng.choice(("stable", *NAMES)), len(world.book.records)
    version = world.rng.randrange(max(0, newest - world.rng.choice([2, 8])), newest)
    return f"{name} to {version}; " + world.act(operator, lambda: move(world, operator, name, version))


def move(world: World, operator: SimulatedProcess, name: str, version: int) -> str:
    done = move_pointer(operator.line, name, version, signing_key=world.key, epoch_patches=world.epoch_patches)
    if (done.name, done.version) != (name, version) or done not in moves_of(world, name):
        world.fail(Invariant.POINTER, f"{name} was moved to version {version}, but {done} is reported")
    return f"makes move {done.number} of {name}"


def named_versions(world: World) -> dict[str, tuple[int, int]]:
    """By name, the newest move of every pointer and the version that it names, if a new worker can reach it."""
    newest = {name: moves[-1] for name in NAMES if (moves := moves_of(world, name))}
    return {name: (one.number, one.version) for name, one in newest.items() if world.book.joinable(one.version)}


def check_pruned(world: World, before: dict[str, tuple[int, int]]) -> None:
    """Check that a prune has kept every pointer that was not moved meanwhile, and a path to its version."""
    kept = {entry.key for entry in world.truth.list(POINTERS)}
    for name, (number, version) in before.items():
        if moves_of(world, name)[-1].number != number:
            continue  # it was moved, perhaps to a version that was about to be deleted
        if keys.pointer_key(name, number) not in kept:
            world.fail(Invariant.POINTER, f"a prune has deleted the newest move of {name}")
        if not world.book.joinable(version):
            world.fail(Invariant.POINTER, f"a prune has left no path to version {version}, which {name} names")
