"""What must hold after every event.

Two invariants are checked as things happen instead: `Ledger` checks that nothing is overwritten, and `PublishLog` that
versions follow from each other.
"""

from collections import Counter

from pulsesync.errors import PulseError
from pulsesync.format import layout as layouts
from pulsesync.format import pointer as pointers
from pulsesync.format.history import History
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.run import keys
from pulsesync.run.bodies import fetch_body
from pulsesync.run.reporting import SyncReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.anchors import AnchorLoader
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import WeightState
from tests.simulator.actors import SimulatedTrainer, SimulatedWorker
from tests.simulator.invariants import Invariant
from tests.simulator.line import BODIES, Crash, bodies_of
from tests.simulator.world import World


def check(world: World) -> None:
    """Check that all processes have what they report, and that every record has its bodies and leads to its version."""
    if world.failure:
        raise world.failure  # raised before, but caught by the library
    for worker in world.workers:
        check_worker(world, worker)
    for trainer in world.trainers:
        check_trainer(world, trainer)
    check_moves(world)
    there = {entry.key for prefix in BODIES for entry in world.truth.list(prefix)}
    for key, record in world.book.stored():
        if lacking := [body for body in bodies_of(record) if body not in there]:
            world.fail(Invariant.BODIES_FIRST, f"{key} is in the store without {lacking[0]}")
        if key not in world.replayed:
            world.replayed[key] = _replay(world, key, record)


def moves_of(world: World, name: str) -> list[Pointer]:
    """All moves of pointers ever made."""
    moves = (pointers.parse(data) for data in world.ledger.moves)
    return [move for move in moves if move.name == name]


def check_moves(world: World) -> None:
    """Check that pointers were moved by one record after the other, with valid signatures, to versions that exist."""
    counts: Counter[str] = Counter()
    for data in world.ledger.moves:
        move = pointers.parse(data, {world.trust} if world.trust else None)
        target = world.book.records[move.version] if move.version < len(world.book.records) else None
        if target is None or (move.run, move.digest) != (target.run, target.digest):
            world.fail(Invariant.POINTER, f"{move.name} names version {move.version}, which is not in this run")
        if move.number != counts[move.name]:
            world.fail(Invariant.POINTER, f"{move.name} has move {move.number} after {counts[move.name]} moves")
        counts[move.name] += 1


def check_followed(world: World, name: str, version: int, moves_before: int) -> None:
    """Check that a worker has the version that its pointer named, at the beginning of the sync or meanwhile."""
    named = [move.version for move in moves_of(world, name)]
    if version not in named[max(0, moves_before - 1) :]:
        world.fail(Invariant.POINTER, f"{name} names version {named[-1:]}, and a worker that follows it has {version}")


def check_worker(world: World, worker: SimulatedWorker) -> None:
    if worker.damaged:
        return
    version = worker.subscriber.version if worker.subscriber else None
    now = world.model.content(worker.weights)
    if version is not None:
        if version >= len(world.book.contents):
            world.fail(Invariant.WORKER_WEIGHTS, f"{worker.name} reports version {version}, which was never committed")
        if different := [name for name in now if now[name] != world.book.contents[version][name]]:
            world.fail(Invariant.WORKER_WEIGHTS, f"{worker.name} reports version {version}, and {different} differ")
        alias = worker.weights.get(world.model.alias or "")
        if alias is not None and alias.tobytes() != now["embed"]:
            world.fail(Invariant.TIED_TENSORS, f"{world.model.alias!r} of {worker.name} differs from 'embed'")
    elif now != worker.last and now not in world.book.contents:
        world.fail(Invariant.WORKER_WEIGHTS, f"{worker.name} reports no version, and its weights are of none")
    worker.last = now


def check_trainer(world: World, trainer: SimulatedTrainer) -> None:
    version = trainer.publisher.version if trainer.publisher else None
    if version is not None:
        if version >= len(world.book.records):
            world.fail(Invariant.PUBLISH_REPORT, f"{trainer.name} is at version {version}, which was never committed")
        if version < trainer.version:
            world.fail(Invariant.PUBLISH_REPORT, f"{trainer.name} went from version {trainer.version} to {version}")
        trainer.version = version
    for future, ordinal in [one for one in trainer.futures if one[0].done()]:
        error = future.exception()
        if error is None:
            check_published(world, future.result().version, ordinal)
        elif not isinstance(error, PulseError | Crash):
            raise AssertionError(f"a publish raised {error!r}") from error
    trainer.futures = [one for one in trainer.futures if not one[0].done()]


def check_published(world: World, version: int | None, ordinal: int) -> None:
    """Check the version that a publish reported, if there is one; ordinal: the number of that call."""
    if version is None:
        return
    if version >= len(world.book.ordinals):
        world.fail(Invariant.PUBLISH_REPORT, f"version {version} is reported, and was never committed")
    if world.book.ordinals[version] < ordinal:
        world.fail(Invariant.PUBLISH_REPORT, f"version {version} is reported by a later publish, and cannot contain it")


def check_synced(world: World, end: Subscriber, report: SyncReport, version: int | None) -> None:
    if report.version != end.version:
        world.fail(Invariant.SYNC_REPORT, f"version {report.version} is reported, and the local one is {end.version}")
    if report.version >= len(world.book.records):
        world.fail(Invariant.SYNC_REPORT, f"version {report.version} is reported, and was never committed")
    if report.digest != world.book.records[report.version].digest:
        world.fail(Invariant.SYNC_REPORT, f"another digest is reported for version {report.version}")
    if version not in (None, report.version):
        world.fail(Invariant.SYNC_REPORT, f"version {version} was requested, but {report.version} is reported")


def check_verified(world: World, worker: SimulatedWorker) -> None:
    """Check that the weights are those of their version, which `verify` has just confirmed."""
    assert worker.subscriber is not None
    version = worker.subscriber.version
    if version is None or world.model.content(worker.weights) != world.book.contents[version]:
        world.fail(Invariant.VERIFIED_WEIGHTS, f"{worker.name} verifies weights that are not version {version}")


def _replay(world: World, key: str, record: Manifest) -> History | None:
    """Apply a record to the weights of its base, whether a worker does so or not, and compare the result.

    Returns the history after it. None: an earlier patch of the epoch was pruned before it was replayed here.
    """
    is_version = record.kind == RecordKind.VERSION
    invariant = Invariant.PATCH_CONTENT if is_version else Invariant.ANCHOR_AND_SQUASH_CONTENT
    history: History | None = History()
    if is_version and record.index > 1:
        history = world.replayed.get(keys.manifest_key(record.version - 1))
    if history is None or (is_version and record.base is None):
        return history  # a root has no body
    arrays = world.model.new(world.book.contents[record.base.version] if record.base else None, "absent")
    try:
        layout = layouts.parse(world.truth.get(keys.layout_key(record.layout)), record.layout)
        state = WeightState.attach(HostBackend, arrays, layout)
        state.history = history
        parts = [fetch_body(world.truth, part, layout, None)[0] for part in record.parts]
        if record.base is None:
            AnchorLoader(state).join_whole(record, parts)
        else:
            state.commit(PatchTransaction(state).prepare(record, parts))
    except PulseError as e:
        world.fail(invariant, f"{key} cannot be applied: {type(e).__name__}: {e}")
    if world.model.content(arrays) != world.book.contents[record.version]:
        world.fail(invariant, f"{key} does not lead to version {record.version}")
    after: History = state.history
    return after
