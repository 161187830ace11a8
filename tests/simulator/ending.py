"""The end of a schedule: with all faults gone, the run can continue at its usual cost, whatever happened before."""

from collections import Counter
from contextlib import suppress

from pulsesync.errors import (
    AnotherPublisherError,
    GroupError,
    PulseError,
    RunChangedError,
    StoreError,
    VerificationError,
)
from pulsesync.run import keys
from tests.readers import Squasher
from tests.simulator.actors import SimulatedProcess, SimulatedTrainer, SimulatedWorker
from tests.simulator.checks import check, check_synced, check_worker, moves_of
from tests.simulator.events import describe_prune, prune_with
from tests.simulator.invariants import Invariant
from tests.simulator.pointers import NAMES, check_pruned, move, named_versions
from tests.simulator.trainers import publish, train
from tests.simulator.workers import new_worker, open_subscriber, sync, verify
from tests.simulator.world import PART_BYTES, World


def finish(world: World) -> None:
    """Without faults: resume the run, squash it, follow it, join it, prune it."""
    try:
        _finish(world)
        check(world)
    except RunChangedError as e:
        world.fail(Invariant.SAME_RUN, f"a process takes the run for another one: {e}")
    except PulseError as e:
        world.fail(Invariant.PROGRESS, f"an error was raised without faults: {type(e).__name__}: {e}")


def _finish(world: World) -> None:
    world.log.append("the end: no more faults")
    world.trouble = 0.0
    world.ledger.arrive()
    for line in world.lines:
        line.calm()
    check(world)
    trainer = world.rng.choice(world.trainers)
    train(world, trainer)
    _publish_for_sure(world, trainer)
    for _ in range(world.epoch_patches):  # an epoch starts, at which an anchor is written if there is none
        if not world.book.joinable() or world.rng.random() < 0.3:
            train(world, trainer)
            _publish_for_sure(world, trainer)
    if not world.book.joinable():
        world.fail(Invariant.PATH_TO_NEWEST, "a whole epoch without faults has led to no anchor")
    check(world)
    process = SimulatedProcess("squasher", world.new_line())
    if world.squasher:
        process, squasher = world.squasher
    else:
        squasher = Squasher(process.line, signing_key=world.key, trust=world.trust, epoch_patches=world.epoch_patches)
    world.log.append(f"squashes {[(s.level, s.number) for s in squasher.run()]}")
    check(world)
    _spoil_head(world)
    _point(world)
    for worker in world.workers:
        _arrive(world, worker)
    _direct_a_fleet(world)
    _join_cheaply(world)
    if world.rng.random() < 0.5:
        _prune(world, trainer, squasher)


def _prune(world: World, trainer: SimulatedTrainer, squasher: Squasher) -> None:
    """Prune, perhaps while all workers are so far behind that their own versions are deleted.

    The run continues as before.
    """
    if world.rng.random() < 0.7:
        world.bury(trainer)
        trainer.options["anchor_every"] = 0.0  # of the next publisher: at every epoch's start
        for _ in range(2 * world.epoch_patches):
            train(world, trainer)
            _publish_for_sure(world, trainer)
        squasher.run()
        _spoil_head(world)
    for name in NAMES if world.rng.random() < 0.8 else ():  # otherwise they keep their version, and all later ones
        world.log.append(move(world, SimulatedProcess("operator", world.new_line()), name, len(world.book.records) - 1))
    named = named_versions(world)
    for hours in (5.0, 0.0):
        world.clock.now_s += hours * 3600
        report = prune_with(world, world.new_line(), 2, 0.0, 1.0)
        world.log.append(describe_prune(report))
        if not world.book.joinable():
            world.fail(Invariant.PATH_TO_NEWEST, "no path is left after a prune")
        check_pruned(world, named)
    _join_cheaply(world)
    train(world, trainer)
    _publish_for_sure(world, trainer)
    for worker in world.workers:
        _arrive(world, worker)


def _point(world: World) -> None:
    """Move the pointer that workers follow to one of the last reachable versions, and make its hint stale."""
    versions = [record.version for record in world.book.records[-4:] if world.book.joinable(record.version)]
    operator = SimulatedProcess("operator", world.new_line())
    world.log.append(move(world, operator, "stable", world.rng.choice(versions)))
    hint = keys.pointer_hint("stable")
    world.truth.put(hint, world.rng.choice([*world.ledger.hints.get(hint, []), b"", b"9999", b"?"]))


def _direct_a_fleet(world: World) -> None:
    """Two workers follow a pointer that is moved forwards and backwards; one of them misses a move."""
    fleet = [new_worker(world, None, follow="stable") for _ in range(2)]
    for number in range(3):
        for worker in fleet[number % 2 :]:
            _arrive(world, worker)
        _point(world)
    for worker in fleet:
        _arrive(world, worker)


def _spoil_head(world: World) -> None:
    """Make the hint to the newest version stale, or wrong."""
    kept = {entry.key for entry in world.truth.list("manifests/")}
    hints = [head for head in world.ledger.heads if keys.manifest_key(int(head)) in kept]
    world.truth.put(keys.HEAD, world.rng.choice([*hints, b"", b"9999", b"?"]))


def _publish_for_sure(world: World, trainer: SimulatedTrainer) -> None:
    """Publish; a publisher that finds another one's version, or a team that lost a rank, is replaced by a new one."""
    try:
        outcome = publish(world, trainer, now=True)
    except (AnotherPublisherError, GroupError):
        world.bury(trainer)
        outcome = publish(world, trainer, now=True)
    assert trainer.publisher is not None
    with trainer.executor.at_once(), suppress(StoreError):  # the error of an old anchor: the next one is written
        trainer.publisher.flush()
    world.log.append(f"{trainer.name} {outcome}")


def _arrive(world: World, worker: SimulatedWorker) -> None:
    open_subscriber(world, worker)
    world.log.append(f"{worker.name} {sync(world, worker)}")
    if worker.damaged:  # by a write that no patch has met
        verify(world, worker)
        world.log.append(f"{worker.name} {sync(world, worker)}")
    assert worker.subscriber is not None
    newest = world.book.records[moves_of(world, worker.follow)[-1].version if worker.follow else -1]
    if worker.subscriber.version != newest.version:
        world.fail(Invariant.PROGRESS, f"{worker.name} does not reach version {newest.version}")
    check_worker(world, worker)
    try:
        counted = worker.subscriber.verify(worker.weights)
    except VerificationError as e:
        world.fail(Invariant.VERIFIED_WEIGHTS, f"{worker.name} has the right weights, and verify raises: {e}")
    if counted != newest.digest:
        world.fail(Invariant.VERIFIED_WEIGHTS, f"verify returns another digest than that of version {newest.version}")


def _join_cheaply(world: World) -> None:
    """A worker without weights joins through an anchor, squashes and the patches of one epoch, with few requests."""
    worker = new_worker(world, None, follow=None)
    end = open_subscriber(world, worker)
    report = end.sync(worker.weights)
    check_synced(world, end, report, None)
    check_worker(world, worker)
    newest = world.book.records[-1]
    world.log.append(f"{worker.name} joins at {report.version} by {report.path}, {worker.line.calls} calls")
    if report.version != newest.version:
        world.fail(Invariant.PROGRESS, f"a joiner does not reach version {newest.version}")
    kinds = Counter(report.path)
    epochs = newest.epoch + 1
    levels = epochs.bit_length()
    limits = {"anchor": 1, "patch": world.epoch_patches, "squash": 2 * levels}
    for kind, limit in limits.items():
        if kinds[kind] > limit:
            world.fail(Invariant.JOIN_COST, f"a joiner applies {kinds[kind]} of kind {kind} over {epochs} epochs")
    of_a_patch = max(len(record.parts) for record in world.book.records)  # one from each rank of a team
    most = 24 + len(report.path) * (1 + of_a_patch + levels) + _parts(world)
    if worker.line.calls > most:
        world.fail(Invariant.JOIN_COST, f"a joiner asks the store {worker.line.calls} times; {most} are enough")


def _parts(world: World) -> int:
    """The most parts of an anchor, for this model."""
    return 1 + sum(tensor.size * tensor.kind.itemsize for tensor in world.model.layout.tensors) // PART_BYTES + 6
