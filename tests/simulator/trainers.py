"""Actions of trainers: train, publish and wait, publish in the background; roll back, die and restart.

Be two, or a team.
"""

import random
from contextlib import suppress
from functools import partial

import numpy as np

from pulsesync.errors import AnotherPublisherError, PulseError
from pulsesync.publish.lifecycle import Stage
from pulsesync.testing.updates import mutate
from tests.publishers import Publisher
from tests.simulator.actors import Content, SimulatedTrainer, bits
from tests.simulator.checks import check_published
from tests.simulator.executors import QueuedExecutor
from tests.simulator.invariants import Invariant
from tests.simulator.teams import Sharding, SimulatedPublisher
from tests.simulator.world import World


def new_trainer(world: World, content: Content) -> SimulatedTrainer:
    grid = world.rng.choice([None, {"layers.*": (2, 2)}, {"*": (3, 1)}])
    options = {
        "resume": True,
        "codec": world.rng.choice(["auto", "auto", "history", "context", "gap", "step", "dense", "xor"]),
        "grid": grid,
        "min_tile": 1,
        "signing_key": world.key,
        "epoch_patches": world.epoch_patches,
        "files": world.rng.choice([None, {"config.json": b"{}"}]),
        "publish_every": world.rng.choice([1, 1, 1, 2, "auto"]),
        "anchor_every": world.rng.choice([0.1, 1.0, 10.0, 100.0]),  # the last value: hardly ever
    }
    sharding = draw_sharding(world) if world.rng.random() < world.teams else None
    name, spool = world.new_name("team" if sharding else "trainer"), world.new_folder("spool")
    return SimulatedTrainer(name, world.new_line(), world.model.new(content), spool, options, sharding=sharding)


def draw_sharding(world: World) -> Sharding:
    shapes = {name: shape for name, (_, shape) in world.model.arrays.items()}
    return Sharding.draw(world.rng, shapes, world.model.alias)


def open_publisher(world: World, trainer: SimulatedTrainer) -> Publisher | SimulatedPublisher:
    if trainer.publisher is None:
        trainer.line, trainer.executor, trainer.version = world.new_line(), QueuedExecutor(), -1
        if trainer.sharding is not None:
            trainer.publisher = _open_team(world, trainer, trainer.sharding)
        else:
            trainer.other_lines = []
            trainer.publisher = world.make_publisher(
                trainer.line, **trainer.options, spool=trainer.spool, executor=trainer.executor
            )
    return trainer.publisher


def _open_team(world: World, trainer: SimulatedTrainer, sharding: Sharding) -> SimulatedPublisher:
    trainer.other_lines = [world.new_line() for _ in range(1, sharding.size)]
    make = partial(world.make_sharded, **trainer.options, spool=trainer.spool)
    rng = random.Random(world.rng.getrandbits(32))
    return SimulatedPublisher(make, sharding, trainer.lines, rng, world.note, world.fail)


def train(world: World, trainer: SimulatedTrainer) -> str:
    """Change some weights: by one unit in the last place, mostly the same ones again; or to anything; or none."""
    kind = world.rng.choices(["adam", "random", "nothing"], [8, 2, 1])[0]
    for name in world.model.arrays if kind != "nothing" else ():
        flat = bits(trainer.weights[name])
        if kind == "random":
            flat[...] = mutate(world.noise, flat, world.rng.choice([0.02, 0.5]))
        else:
            places = world.noise.integers(0, max(1, flat.size // 8), max(1, flat.size // 100))
            if trainer.sharding is not None:
                places = places * 8 % flat.size  # in the parts of all ranks
            flat[places] += world.noise.choice(np.array([1, 1, -1]).astype(flat.dtype), places.size)
    trainer.step += 1
    if world.rng.random() < 0.2:
        trainer.saved.append((trainer.step, world.model.content(trainer.weights)))
    return f"{trainer.name} to step {trainer.step}, {kind}"


def publish(world: World, trainer: SimulatedTrainer, now: bool = False) -> str:
    """Publish and wait for it."""
    end = open_publisher(world, trainer)
    content, ordinal = _note_call(world, trainer)
    idle = isinstance(end, Publisher) and end._queue.stage == Stage.IDLE
    late = idle and world.rng.random() < 0.5  # a waiting anchor is written after this version
    with trainer.executor.at_once(backlog=not late):
        try:
            report = end.publish(trainer.weights, step=trainer.step, now=now)
        except AnotherPublisherError:
            if world.rng.random() < 0.7:  # otherwise it tries again, and gets the same error
                world.bury(trainer)
            raise
    if report.version is None:
        return "coalesces a step"
    check_published(world, report.version, ordinal)
    if report.version != end.version:
        world.fail(Invariant.PUBLISH_REPORT, f"version {report.version} is reported, and the last is {end.version}")
    if world.book.contents[report.version] != content:
        world.fail(Invariant.PUBLISH_REPORT, f"version {report.version} is reported, but is another state")
    return f"makes version {report.version}"


def publish_in_background(world: World, trainer: SimulatedTrainer) -> str:
    end = open_publisher(world, trainer)
    _, ordinal = _note_call(world, trainer)
    if isinstance(end, SimulatedPublisher):
        futures = end.publish_in_background(trainer.weights, step=trainer.step)
    else:
        futures = [end.publish(trainer.weights, step=trainer.step, wait=False)]
    trainer.futures += [(future, ordinal) for future in futures]
    return f"queues step {trainer.step}"


def _go_on(world: World, trainer: SimulatedTrainer) -> None:
    """The trainer's thread publishes while background threads work."""
    end = trainer.publisher
    if not isinstance(end, Publisher) or end.version is None or end._queue.lock._is_owned():  # type: ignore[attr-defined]
        return  # without a base, or if the lock is taken, the trainer's thread would have to wait
    world.note(f"meanwhile: {train(world, trainer)}")
    world.counts["publish meanwhile"] += 1
    with suppress(PulseError):
        publish_in_background(world, trainer)
    quiet = end._queue.stage != Stage.SENDING
    if quiet and trainer.executor.waiting:  # an anchor is being written, and no version: both continue
        trainer.executor.run_one()


def _note_call(world: World, trainer: SimulatedTrainer) -> tuple[Content, int]:
    content = world.model.content(trainer.weights)
    return content, world.book.add_call(trainer.step, content)


def on_train(world: World) -> str:
    trainer = world.pick(world.trainers)
    return train(world, trainer) if trainer else "no trainer is idle"


def on_roll_back_to_a_checkpoint(world: World) -> str:
    trainer = world.pick([one for one in world.trainers if one.saved])
    if trainer is None:
        return "there is none"
    trainer.step, content = world.rng.choice(trainer.saved)
    world.model.fill(trainer.weights, content)
    return f"{trainer.name} to step {trainer.step}"


def on_publish(world: World) -> str:
    trainer = world.pick(world.trainers)
    if trainer is None:
        return "no trainer is idle"
    if world.rng.random() < 0.6:
        train(world, trainer)
    open_publisher(world, trainer)
    return world.act(trainer, lambda: publish(world, trainer))


def on_publish_in_background(world: World) -> str:
    trainer = world.pick(world.trainers)
    if trainer is None:
        return "no trainer is idle"
    if world.rng.random() < 0.6:
        train(world, trainer)
    open_publisher(world, trainer)
    return world.act(trainer, lambda: publish_in_background(world, trainer))


def on_background_work(world: World) -> str:
    """Run some tasks of a publisher's background threads; meanwhile the trainer may continue."""
    trainer = world.pick([one for one in world.trainers if one.waiting])
    if trainer is None:
        return on_publish_in_background(world)  # so that there is a task
    if isinstance(team := trainer.publisher, SimulatedPublisher):
        return world.act(trainer, team.work, lambda count: f"does {count} tasks")
    number = world.rng.randrange(trainer.executor.waiting)

    def work() -> str:
        if world.rng.random() < 0.3 * world.trouble:
            trainer.line.interrupt(world.rng.randint(1, 6), lambda: _go_on(world, trainer))
        trainer.executor.run_one(number)
        return f"does task {number}"

    return world.act(trainer, work)


def on_restart_the_trainer(world: World) -> str:
    """A new process, with the same, older or other weights, with its spool or on another machine.

    Or a team instead of a process, a process instead of a team, or a team with other shards.
    """
    trainer = world.pick(world.trainers)
    if trainer is None:
        return "no trainer is idle"
    world.bury(trainer)
    trainer.kill()
    kind = world.rng.choice(["the same", "older", "base", "any version's", "other"])
    if kind == "older" and trainer.saved:
        trainer.step, content = world.rng.choice(trainer.saved)
        world.model.fill(trainer.weights, content)
    elif kind == "base":
        world.model.fill(trainer.weights, world.base)
    elif kind == "any version's" and world.book.contents:
        world.model.fill(trainer.weights, world.rng.choice(world.book.contents))
    elif kind == "other":
        train(world, trainer)
    else:
        kind = "the same"
    change = world.rng.choice(["nothing", "nothing", "the spool", "the trainer", "the shards"])
    if change == "the spool":
        trainer.spool = world.new_folder("spool")
        return f"{trainer.name} with {kind} weights and a new spool"
    if change == "the trainer":
        return f"{trainer.name} with {kind} weights, as {_replace(world, trainer).name}"
    if change == "the shards" and trainer.sharding is not None:
        trainer.sharding = draw_sharding(world)
        return f"{trainer.name} with {kind} weights, now over {trainer.sharding.size} ranks"
    return f"{trainer.name} with {kind} weights"


def _replace(world: World, trainer: SimulatedTrainer) -> SimulatedTrainer:
    """Replace a trainer by another one, with other options: a process instead of a team, or vice versa."""
    other = new_trainer(world, world.model.content(trainer.weights))
    other.step, other.saved = trainer.step, trainer.saved
    world.trainers[world.trainers.index(trainer)] = other
    return other


def on_a_second_trainer(world: World) -> str:
    if len(world.trainers) > 1:
        left = world.pick(world.trainers)
        if left is None:
            return "no trainer is idle"
        world.bury(left)
        left.kill()
        world.trainers.remove(left)
        return f"{left.name} is gone"
    first = world.trainers[0]
    world.trainers.append(new_trainer(world, world.model.content(first.weights)))
    world.trainers[-1].step = first.step
    return world.trainers[-1].name
