"""What must hold after every event, and of what was written by the end.

Two things are looked at as they happen instead: `Ledger` sees that nothing is overwritten, and `Book` that versions
follow from each other.
"""

from pulsesync.errors import PulseError
from pulsesync.format import layout as layouts
from pulsesync.format.body import Body
from pulsesync.format.manifest import RecordKind
from pulsesync.run import keys
from pulsesync.run.subscriber import Subscriber, SyncReport
from pulsesync.state.live import State
from pulsesync.testing.simulator.actors import SimulatedTrainer, SimulatedWorker
from pulsesync.testing.simulator.line import BODIES, Crash
from pulsesync.testing.simulator.world import World


def check(world: World) -> None:
    """See that everybody holds what they say they hold, and that no record is there without its bodies."""
    for worker in world.workers:
        check_worker(world, worker)
    for trainer in world.trainers:
        check_trainer(world, trainer)
    there = {entry.key for prefix in BODIES for entry in world.truth.list(prefix)}
    for key, record in world.book.stored():
        named = [keys.layout_key(record.layout), *(keys.part_key(part.id) for part in record.parts)]
        lacking = [one for one in named if one not in there]
        assert not lacking, f"{key} is there without {lacking[0]}"


def check_worker(world: World, worker: SimulatedWorker) -> None:
    if worker.damaged:
        return
    version = worker.subscriber.version if worker.subscriber else None
    now = world.model.content(worker.weights)
    if version is not None:
        assert version < len(world.book.contents), f"{worker.name} holds version {version}, which was never made"
        different = [name for name in now if now[name] != world.book.contents[version][name]]
        assert not different, f"{worker.name} says it holds version {version}; {different} are other weights"
        alias = worker.weights.get(world.model.alias or "")
        assert alias is None or alias.tobytes() == now["embed"], f"{worker.name} has come untied"
    else:
        assert now == worker.last or now in world.book.contents, f"the weights of {worker.name} are no version"
    worker.last = now


def check_trainer(world: World, trainer: SimulatedTrainer) -> None:
    version = trainer.publisher.version if trainer.publisher else None
    if version is not None:
        assert version < len(world.book.records), f"{trainer.name} says it published {version}, which was never made"
        assert version >= trainer.version, f"the version of {trainer.name} went from {trainer.version} to {version}"
        trainer.version = version
    for future, ordinal in [one for one in trainer.futures if one[0].done()]:
        error = future.exception()
        if error is not None:
            assert isinstance(error, PulseError | Crash), f"a publish raised {error!r}"
        elif (made := future.result().version) is not None:
            assert world.book.ordinals[made] >= ordinal, f"version {made} is older than a publish that reports it"
    trainer.futures = [one for one in trainer.futures if not one[0].done()]


def check_synced(world: World, end: Subscriber, report: SyncReport, version: int | None) -> None:
    assert report.version == end.version, f"{report.version} is reported, {end.version} is held"
    assert report.version < len(world.book.records), f"{report.version} is held, and no such version was ever made"
    assert report.digest == world.book.records[report.version].digest, f"the digest of {report.version} is another"
    assert version in (None, report.version), f"{version} was asked for, {report.version} is held"


def audit(world: World) -> None:
    """See that anchors and squashed patches lead to their versions, whether somebody went that way or not."""
    for key, record in world.book.stored():
        if record.kind == RecordKind.VERSION:
            continue
        layout = layouts.parse(world.truth.get(keys.layout_key(record.layout)))
        parts = [Body.of(world.truth.get(keys.part_key(part.id)), layout, part.id) for part in record.parts]
        arrays = world.model.new(world.book.contents[record.base.version] if record.base else None, "absent")
        state = State.attach(arrays, layout)
        if record.base is None:
            state.load_whole(parts, state.check_whole(record, parts))
        else:
            state.commit(state.prepare(record, parts))
        assert world.model.content(arrays) == world.book.contents[record.version], (
            f"{key} is not version {record.version}"
        )
