"""Actions of workers: join, sync, be interrupted; find damage; die, resume and leave."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from pulsesync.errors import VerificationError
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.host import HostBackend
from pulsesync.state.weights import WeightState
from pulsesync.testing.updates import random_bits
from tests.simulator.actors import Arrays, Content, SimulatedWorker, bits
from tests.simulator.checks import check_followed, check_synced, check_verified, moves_of
from tests.simulator.invariants import Invariant
from tests.simulator.world import Interrupted, World

WORKERS = 4  # at most, at a time


def new_worker(world: World, content: Content | None, follow: str | None) -> SimulatedWorker:
    weights = world.model.new(content, world.rng.choice(["shared", "copy", "absent"]))
    cache = world.new_folder("cache") if world.rng.random() < 0.4 else None
    name, now = world.new_name("worker"), world.model.content(weights)
    worker = SimulatedWorker(name, world.new_line(), weights, now, cache, follow)
    open_subscriber(world, worker)
    return worker


def open_subscriber(world: World, worker: SimulatedWorker) -> Subscriber:
    if worker.subscriber is None:
        worker.line = world.new_line()
        worker.subscriber = world.make_subscriber(
            worker.line,
            trust=world.trust,
            cache=worker.cache,
            undo=world.rng.choice([0, 1, 3]),
            follow=worker.follow,
            epoch_patches=world.epoch_patches,
        )
    return worker.subscriber


def sync(world: World, worker: SimulatedWorker, version: int | None = None) -> str:
    end = open_subscriber(world, worker)
    before, moves = end.version, len(moves_of(world, worker.follow or ""))
    report = end.sync(worker.weights, version)
    check_synced(world, end, report, version)
    if version is None and worker.follow:
        check_followed(world, worker.follow, report.version, moves)
    elif version is None and report.version < (before or 0):
        world.fail(Invariant.SYNC_REPORT, f"{worker.name} went from version {before} to {report.version}")
    if "anchor" in report.path:
        worker.damaged = False  # all weights were written
    to = "" if version is None else f" (requested {version})"
    return f"from {before} to {report.version}{to} by {', '.join(report.path) or 'nothing'}"


def refill(world: World, worker: SimulatedWorker, content: Content) -> None:
    world.model.fill(worker.weights, content)
    alias = worker.weights.get(world.model.alias or "")
    if alias is not None:
        bits(alias)[...] = bits(worker.weights["embed"])
    worker.last, worker.damaged = content, False


def on_join(world: World) -> str:
    if len(world.workers) >= WORKERS:
        return "there are enough workers"
    kind = world.rng.choice(["zeros", "base", "any version", "other weights"])
    content: Content | None = None
    if kind == "base":
        content = world.base
    elif kind == "any version" and world.book.contents:
        content = world.rng.choice(world.book.contents)
    elif kind == "other weights":
        content = world.model.content(world.model.arbitrary(world.noise))
    worker = new_worker(world, content, world.rng.choice([None, "stable"]))
    world.workers.append(worker)
    return f"{worker.name} with {kind}; " + world.act(worker, lambda: sync(world, worker))


def on_sync(world: World) -> str:
    worker = world.pick(world.workers)
    if worker is None:
        return "no worker is idle"
    open_subscriber(world, worker)
    return world.act(worker, lambda: sync(world, worker))


def on_sync_to_a_version(world: World) -> str:
    worker = world.pick(world.workers)
    if worker is None or not world.book.records:
        return "no worker is idle"
    open_subscriber(world, worker)
    version = world.rng.randrange(max(0, len(world.book.records) - 8), len(world.book.records) + 1)
    return world.act(worker, lambda: sync(world, worker, version))


def on_restart_a_worker(world: World) -> str:
    worker = world.pick(world.workers)
    if worker is None:
        return "no worker is idle"
    world.bury(worker)
    worker.kill()
    kind = world.rng.choice(["its weights", "zeros", "base"])
    if kind == "its weights":
        worker.last, worker.damaged = world.model.content(worker.weights), False
    else:
        refill(world, worker, world.base if kind == "base" else world.model.content(world.model.new()))
    if worker.cache and world.rng.random() < 0.3:
        shutil.rmtree(worker.cache, ignore_errors=True)
    return f"{worker.name} with {kind}"


def on_resume_a_worker(world: World) -> str:
    """Save version, history and weights; or restart from what was saved, which may be old."""
    worker = world.pick(world.workers)
    if worker is None:
        return "no worker is idle"
    end = worker.subscriber
    if end and end.version is not None and end.state and (worker.saved is None or world.rng.random() < 0.5):
        worker.saved = end.version, end.state.history.to_bytes(), world.model.content(worker.weights)
        if world.rng.random() < 0.4:
            return f"{worker.name} saves version {end.version}"
    if worker.saved is None:
        return f"{worker.name} has nothing to resume from"
    version, history, content = worker.saved
    if world.rng.random() < 0.4:
        content = world.rng.choice(world.book.contents)  # other weights were loaded meanwhile
    world.bury(worker)
    refill(world, worker, content)
    again = open_subscriber(world, worker)

    def resume() -> str:
        done = again.resume(worker.weights, version, history if world.rng.random() < 0.9 else None)
        if done != (again.version == version):
            world.fail(Invariant.SYNC_REPORT, f"resume({version}) returned {done}, with version {again.version}")
        return f"resumes from {version}: {done}"

    return world.act(worker, resume)


def on_damage_a_worker(world: World) -> str:
    """Another program writes to the weights. A sync may repair that, a recount detects it, or a later sync meets it."""
    worker = world.pick([one for one in world.workers if one.subscriber and one.subscriber.version is not None])
    if worker is None:
        return "there is no worker"
    flat = bits(worker.weights[world.rng.choice(list(world.model.arrays))])
    kind = world.rng.choice(["a bit", "zeros", "ones", "others", "moved"])
    if kind == "a bit":
        flat[world.rng.randrange(flat.size)] ^= 1
    elif kind == "moved":
        flat[:] = np.roll(flat, 1)
    elif kind == "others":
        flat[:] = random_bits(world.noise, flat.dtype.type, flat.shape)
    else:
        flat[:] = 0 if kind == "zeros" else np.iinfo(flat.dtype).max
    worker.damaged = True
    if world.rng.random() < 0.4:
        return f"{worker.name}: {kind}"

    def find() -> str:
        if world.rng.random() < 0.5:
            sync(world, worker)
        verify(world, worker)
        return f"{kind}; is repaired, or gone"

    return world.act(worker, find)


def verify(world: World, worker: SimulatedWorker) -> None:
    """Recount the weights: those of a damaged worker are its version by chance, or it reports none any more."""
    end = open_subscriber(world, worker)
    try:
        end.verify(worker.weights)
        check_verified(world, worker)
    except VerificationError:
        if not worker.damaged:
            raise
    worker.last, worker.damaged = world.model.content(worker.weights), False


def on_interrupt_a_write(world: World) -> str:
    """A sync that is interrupted in the middle of its commit."""
    worker = world.pick(world.workers)
    if worker is None:
        return "no worker is idle"
    open_subscriber(world, worker)
    number = world.rng.randrange(3)
    with _interrupted_commit(worker.weights, number):
        return world.act(worker, lambda: sync(world, worker))


def on_leave(world: World) -> str:
    worker = world.pick(world.workers)
    if worker is None:
        return "no worker is idle"
    world.workers.remove(worker)
    return worker.name


@contextmanager
def _interrupted_commit(weights: Arrays, number: int) -> Iterator[None]:
    """Interrupt the n-th write of a commit to these weights, once."""
    commit, write = WeightState.commit, HostBackend.write_change
    left: list[int] = []

    def commit_(state: WeightState, transition: Any) -> Any:
        if state.is_attached_to(weights):
            left.append(number)
        try:
            return commit(state, transition)
        finally:
            left.clear()

    def write_(backend: HostBackend, ordinal: int, change: Any) -> None:
        write(backend, ordinal, change)
        if left and left[0] == 0:
            left.clear()
            raise Interrupted
        left[:] = [count - 1 for count in left]

    with mock.patch.object(WeightState, "commit", commit_), mock.patch.object(HostBackend, "write_change", write_):
        yield
