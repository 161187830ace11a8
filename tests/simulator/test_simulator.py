"""Whole runs by a seed; and mistakes that could be made in this library, which the simulator must find."""

import inspect
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain as chained
from typing import Any

import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Bits, BlockChange, Tile
from pulsesync.errors import (
    AnotherPublisherError,
    GroupError,
    NotFoundError,
    PulseError,
    RunRolledBackError,
    StoreError,
)
from pulsesync.format import signature
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import FileRef, Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import SigningKey
from pulsesync.maintain import point as pointing
from pulsesync.maintain import prune as pruning
from pulsesync.maintain.squash import _Span
from pulsesync.publish import commit, team, writer
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.commit import create
from pulsesync.publish.lifecycle import MOVES, PendingVersion, PublishReport, SendQueue, Stage
from pulsesync.publish.ownership import RankReport, VersionTables
from pulsesync.publish.sharded import ShardedPublisher
from pulsesync.publish.team import CoordinatorMessage
from pulsesync.publish.writer import Draft, RankBase, RunWriter
from pulsesync.run import keys, planner
from pulsesync.run.planner import Look, Position
from pulsesync.run.pointers import FollowTarget, list_moves
from pulsesync.run.reader import RunReader
from pulsesync.state import sharding
from pulsesync.state.host import HostState, HostTransition
from pulsesync.state.live import AnyTransition, LiveState, Snapshot
from pulsesync.state.sharding import Shards, TileShare
from pulsesync.store import CachedStore, MemoryStore, ObjectEntry, Store
from tests.simulator import (
    TEAMS,
    InlineExecutor,
    Invariant,
    InvariantError,
    QueuedExecutor,
    RunSimulator,
    SimulationCrashError,
)
from tests.simulator import teams as simulated_teams
from tests.simulator.ending import finish
from tests.simulator.teams import SimulatedGroup
from tests.simulator.trainers import new_trainer

QUICK, SCHEDULES, CHUNK, EVENTS = 20, 200, 10, 24
SEEDS_FOR_A_FAULT, EVENTS_WITH_A_FAULT = 80, 40  # the rarest of them is met by 13 of 160 schedules
CHUNKS = [
    pytest.param(first, marks=[pytest.mark.slow] if first >= QUICK else []) for first in range(0, SCHEDULES, CHUNK)
]


@pytest.mark.parametrize("first", CHUNKS)
def test_a_run_survives_what_can_happen_to_it(first: int) -> None:
    for seed in range(first, first + CHUNK):
        RunSimulator(seed, events=EVENTS).run()


@pytest.mark.parametrize("teams", [0.0, 1.0])
def test_the_same_seed_is_the_same_schedule(teams: float) -> None:
    first, second = RunSimulator(3, teams=teams), RunSimulator(3, teams=teams)
    assert first.run() == second.run()
    assert first.log == second.log


class KnownThreads(MemoryStore):
    """A store for the simulator's own threads, of which one runs at a time: with others, seeds would not repeat."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        here = threading.current_thread()
        assert here is threading.main_thread() or here.name.startswith("rank "), f"{key} is read in {here.name}"
        return super().get(key, begin, end)


@pytest.mark.slow
def test_the_library_starts_no_thread_that_uses_the_store() -> None:
    for seed in range(10):
        RunSimulator(seed, store=KnownThreads).run()


def test_a_schedule_has_many_events_and_faults() -> None:
    reports = [RunSimulator(seed).run() for seed in range(8)]
    assert sum(report.faults.total() for report in reports) > 40
    assert all(report.versions > 2 for report in reports)
    assert len(set(chained.from_iterable(report.events for report in reports))) > 15


def test_the_command_line_runs_schedules_and_says_what_they_were() -> None:
    command = [sys.executable, "-m", "tests.simulator", "--seeds", "0:2", "--events", "10"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "failed: none" in found.stdout
    assert found.stderr == ""


# Teams


def met(seed: int) -> list[str]:
    """The log of three ranks that gather twice, in the order in which they ran."""
    group, log = SimulatedGroup(3, random.Random(seed)), list[str]()

    def work(rank: int) -> list[bytes]:
        for number in range(2):
            log.append(f"{rank} comes to gather {number}")
            notes = group.gather(rank, b"%d" % rank, misses=False)
        return notes

    ended = group.run([partial(work, rank) for rank in range(3)])
    assert [one.result() for one in ended] == [[b"0", b"1", b"2"]] * 3
    return log


def test_ranks_run_one_after_the_other_up_to_each_gather_in_an_order_of_the_seed() -> None:
    assert [line[-1] for line in met(0)] == ["0"] * 3 + ["1"] * 3
    assert met(0) == met(0)
    assert len({tuple(met(seed)) for seed in range(20)}) > 10


@pytest.mark.parametrize("early", [RuntimeError("no"), None])
def test_a_rank_that_ends_fails_the_gather_of_the_others(early: Exception | None) -> None:
    group = SimulatedGroup(3, random.Random(0))

    def end() -> list[bytes]:
        if early:
            raise early
        return []

    works: list[Callable[[], list[bytes]]] = [
        partial(group.gather, 0, b"", False),
        end,
        partial(group.gather, 2, b"", False),
    ]
    first, second, third = (one.exception() for one in group.run(works))
    assert second is early
    assert isinstance(first, GroupError)
    assert isinstance(third, GroupError)


def test_a_rank_that_blocks_ends_the_schedule_with_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    class Stuck(ShardedPublisher):
        def publish(self, source: Any, **options: Any) -> Any:
            if self.team.rank == 1:
                released.wait(30)
            return super().publish(source, **options)

    monkeypatch.setattr(simulated_teams, "TURN_S", 0.2)
    try:
        with pytest.raises(
            SimulationCrashError, match=r"seed 5, event 0: .*rank 1 has neither ended nor reached"
        ) as caught:
            RunSimulator(5, teams=1.0, sharded=Stuck).run()
    finally:
        released.set()
    assert "--seed 5 --events 40 --teams 1" in str(caught.value)


def test_ranks_that_never_stop_meeting_end_the_schedule() -> None:
    class Talkative(ShardedPublisher):
        def publish(self, source: Any, **options: Any) -> Any:
            while True:
                self.team.gather(b"")

    with pytest.raises(SimulationCrashError, match="the ranks have made 100 gathers in one call"):
        RunSimulator(0, teams=1.0, trouble=0.0, sharded=Talkative).run()


@pytest.mark.slow
def test_teams_publish_in_parts_die_and_miss_gathers_and_resume_the_run() -> None:
    simulators = [RunSimulator(seed, teams=1.0) for seed in range(8)]
    faults = sum((simulator.run().faults for simulator in simulators), Counter[str]())
    assert min(faults["crash"], faults["missed"]) > 3
    patches = [record for simulator in simulators for record in simulator.records if record.base]
    assert len(patches) > 30
    assert sum(len(patch.parts) > 1 for patch in patches) > 15


def test_teams_and_single_trainers_resume_each_others_runs() -> None:
    simulator = RunSimulator(0, trouble=0.0, teams=0.5)
    world, events = simulator.world, [*["restart the trainer"] * 4, "train", "publish"] * 20
    with world.rules():
        world.trainers.append(new_trainer(world, world.base))
        for event in events:
            simulator._happen(event)
        finish(world)
    log = "\n".join(simulator.log)
    assert "Error" not in log
    for change in (
        "team .*, as trainer",
        "trainer .*, as team",
        "team .*, now over 2 ranks",
        "team .*, now over 3 ranks",
    ):
        assert re.search(f"restart the trainer: {change}", log), change
    bases = [record.base is not None for record in simulator.records[1:]]
    assert bases.count(True) > bases.count(False) > 0  # where the tiles do not fit the shards, a root follows


# The life of a version

# The simulator needs no thread for the sender, so starting one cannot fail; and its ranks make their calls in step, so
# that none is late
NEVER_SIMULATED = {(Stage.QUEUED, Stage.IDLE), (Stage.FIXED, Stage.ENDING)}


@pytest.mark.slow
def test_schedules_make_every_move_in_the_life_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each move is asserted to be one of the table's where it is made."""
    made, move = set[tuple[Stage, Stage]](), SendQueue._move

    def watched(self: SendQueue, stage: Stage) -> None:
        made.add((self.stage, stage))
        move(self, stage)

    monkeypatch.setattr(SendQueue, "_move", watched)
    for seed in range(40):
        RunSimulator(seed, teams=0.5).run()
    assert made == MOVES.keys() - NEVER_SIMULATED


# Executors


def test_a_queued_executor_works_when_it_is_told() -> None:
    executor, done = QueuedExecutor(), list[int]()
    futures = [executor.submit(done.append, number) for number in range(3)]
    assert (done, executor.waiting) == ([], 3)
    executor.run_one(1)
    assert (done, [future.done() for future in futures]) == ([1], [False, True, False])
    with executor.at_once():
        executor.submit(done.append, 3)
        assert done == [1, 0, 2, 3]


def test_who_waits_for_a_queued_task_has_it_done() -> None:
    executor, done = QueuedExecutor(), list[int]()
    executor.submit(done.append, 0)
    executor.submit(done.append, 1).result()
    assert (done, executor.waiting) == ([1], 1)


def test_executors_keep_what_a_task_raises_for_its_future() -> None:
    def fail() -> None:
        raise ValueError("no")

    queued = QueuedExecutor()
    futures: list[Future[None]] = [InlineExecutor().submit(fail), queued.submit(fail)]
    queued.run_all()
    assert [str(future.exception()) for future in futures] == ["no", "no"]


# Failures


def test_a_failed_schedule_says_which_invariant_at_which_event_and_how_to_repeat_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CachedStore, "create", CachedStore.put)
    with pytest.raises(InvariantError) as caught:
        RunSimulator(0, events=30).run()
    error = caught.value
    assert (error.invariant, error.seed, error.event) == (Invariant.IMMUTABLE_OBJECTS, 0, 0)
    first, *log, command = str(error).splitlines()
    assert first.startswith("seed 0, event 0: IMMUTABLE_OBJECTS: manifests/0000000000000000 is put")
    assert "publish" in log
    assert command == "To repeat it: python -m tests.simulator --seed 0 --events 30"


def test_an_unexpected_exception_is_a_crash_and_violates_no_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subscriber, "_commit", lambda self, transition: None)
    with pytest.raises(SimulationCrashError, match=r"TypeError: .* unexpected keyword argument 'goes_on'") as caught:
        RunSimulator(0, events=40).run()
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_violation_that_the_library_catches_ends_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes anchors raises nothing: what stops an anchor is logged."""

    def begin(self: AnchorWriter, snapshot: Any, version: Manifest, tiles: Sequence[Tile]) -> None:
        self._current = self._start(0, self.store.put, keys.anchor_key(0), b"not an anchor")

    monkeypatch.setattr(AnchorWriter, "begin", begin)
    with pytest.raises(InvariantError, match="anchors/0000000000000000 is put") as caught:
        RunSimulator(0).run()
    assert caught.value.invariant is Invariant.IMMUTABLE_OBJECTS


def test_a_simulator_runs_the_classes_that_it_is_given() -> None:
    made: Counter[str] = Counter()

    class OwnPublisher(Publisher):
        def publish(self, *args: Any, **kwargs: Any) -> Any:
            made["publish"] += 1
            return super().publish(*args, **kwargs)

    class OwnSubscriber(Subscriber):
        def sync(self, *args: Any, **kwargs: Any) -> Any:
            made["sync"] += 1
            return super().sync(*args, **kwargs)

    report = RunSimulator(0, publisher=OwnPublisher, subscriber=OwnSubscriber).run()
    assert made["publish"] >= report.events["publish"]
    assert made["sync"] >= report.events["sync"]


# Planted faults


class TwoTrainers(RunSimulator):
    """Schedules in which two trainers publish into the same run, and little else happens."""

    def _draw(self) -> str:
        if len(self.world.trainers) < 2:
            return "a second trainer"
        return self.world.rng.choice(["train", "publish", "publish", "publish"])


@dataclass(frozen=True)
class PlantedFault:
    """A mistake in place of one function of the library, and the invariant that it must violate.

    Args:
        owner: The class or module that has the function.
        name: Of the function.
        mistake: What is there instead. It must have the same parameters.
        violates: The invariant.
        teams: How often a trainer is a team in the schedules that find it.
        simulator: The class of these schedules.
    """

    owner: Any
    name: str
    mistake: Callable[..., Any]
    violates: Invariant
    teams: float = TEAMS
    simulator: type[RunSimulator] = RunSimulator

    def __str__(self) -> str:
        return self.mistake.__name__

    def schedule(self, seed: int) -> RunSimulator:
        return self.simulator(seed, events=EVENTS_WITH_A_FAULT, teams=self.teams)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function. Raises: AssertionError, if this fault is older than the code it is planted in."""
        where = f"{self.owner.__name__}.{self.name}"
        assert self.name in vars(self.owner), f"{self} replaces {where}, which does not exist"
        real, planted = parameters(getattr(self.owner, self.name)), parameters(self.mistake)
        assert planted == real, f"{self} has the parameters {planted}, and {where} has {real}"
        monkeypatch.setattr(self.owner, self.name, self.mistake)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names, kinds and defaults, without types."""
    found = inspect.signature(function).parameters.values()
    return [f"{one.replace(annotation=one.empty)} ({one.kind.description})" for one in found]


SUBSCRIBER_COMMIT, RESUME, GOAL = Subscriber._commit, Subscriber.resume, Subscriber._goal
STATE_COMMIT, PREPARE, SPAN_THEN = HostState.commit, HostState._prepare, _Span.then
WRITE, CREATE, ADVANCE, PUT = RunWriter.write, RunWriter._create, RunWriter._advance, RunWriter._put
NEXT_RECORD = commit.next_record
CREATE_MOVE, FOLLOW = pointing._create, FollowTarget.find


def advance_the_base_before_the_commit(
    self: RunWriter, base: RankBase, reports: Sequence[RankReport], version: PendingVersion, clock: Any
) -> CoordinatorMessage:
    assert self._draft is not None
    base.state.commit(self._draft.transition)
    return CREATE(self, base, reports, version, clock)


def write_the_record_before_the_body(self: RunWriter, part: EncodedPart) -> PartRef:
    return PartRef(part.id, len(part.data))


def take_no_answer_for_a_commit(store: Store, manifest: Manifest, data: bytes, after: Manifest | None) -> int:
    try:
        return create(store, manifest, data, after)
    except AnotherPublisherError:
        raise
    except StoreError:
        return 0


def report_the_version_before(self: RunWriter, version: PendingVersion) -> PublishReport:
    report = WRITE(self, version)
    assert report.version is not None
    return replace(report, version=report.version - 1)


def forget_that_what_waits_was_compared_with_the_base_before(
    self: RunWriter, draft: Draft, last: Manifest, record: bytes, waiting: Sequence[PendingVersion | None]
) -> RankBase:
    return ADVANCE(self, draft, last, record, [])


def begin_an_epoch_too_early(
    last: Manifest,
    step: int,
    parts: tuple[PartRef, ...],
    state_digest: str,
    history: str | None,
    anchor: int | None,
    files: tuple[FileRef, ...],
    lowest_step: int | None = None,
) -> Manifest:
    record = NEXT_RECORD(last, step, parts, state_digest, history, anchor, files, lowest_step)
    return replace(record, epoch=last.epoch + 1, index=1)


def put_what_must_be_created(self: CachedStore, key: str, data: bytes) -> None:
    self.store.put(key, data)


def report_before_the_commit(
    self: Subscriber, transition: AnyTransition, record: Manifest, progress: Any, goes_on: bool
) -> None:
    self._move_to(record)
    SUBSCRIBER_COMMIT(self, transition, record, progress, goes_on)


def verify_without_counting(self: Subscriber, source: Any | None = None) -> str:
    assert self._state is not None
    return self._state.digest


def resume_from_any_weights(self: Subscriber, source: Any, version: int, history: bytes | None) -> bool:
    record = RunReader(self.store, self.trust).version(version)
    if record is not None and not RESUME(self, source, version, history):
        self._move_to(record)
    return record is not None


def go_to_the_newest_version_instead(self: Subscriber, version: int | None, records: RunReader) -> Manifest | None:
    return GOAL(self, None, records)


def take_a_pruned_run_for_another(
    self: RunReader, run: str, version: int, digest: str, advice: str = planner.START_OVER
) -> None:
    if self.version(version) is None:
        raise RunRolledBackError("the local version is gone", version=version, run=run)


def write_before_the_path_was_checked(
    self: HostState, versions: Any, changes: Any, sums: Any, history: Any, checking: Any
) -> Any:
    changes, *rest = PREPARE(self, versions, changes, sums, history, checking)
    for (ordinal, _), change in changes.items():
        self.write_change(ordinal, change)
    return changes, *rest


def commit_without_rollback(self: HostState, transition: AnyTransition) -> AnyTransition:
    back = HostTransition({}, self.sums, self.history)
    for (ordinal, _), change in transition.changes.items():
        self.write_change(ordinal, change)
    self.sums, self.history = transition.sums, transition.history
    return back


def commit_all_but_the_last_block(self: HostState, transition: AnyTransition) -> AnyTransition:
    changes = dict(list(transition.changes.items())[:-1])
    return STATE_COMMIT(self, HostTransition(changes, transition.sums, transition.history))


def write_one_of_two_tied_tensors(self: HostState, ordinal: int, change: BlockChange) -> None:
    self.places[ordinal].write({name: (flat,) for name, flat in self.flats.items()}, change)


def read_the_live_state(self: Snapshot, tile: Tile, number: int) -> Bits:
    return self._state.block(tile, number)


def believe_the_head(self: RunReader, after: int = -1) -> Manifest | None:
    head = self._hint(keys.HEAD)
    return self.version(head) if head > after else None


def use_no_squash(at: Position, last: int, look: Look) -> Manifest | None:
    return None


def keep_the_newest_version_alone(
    versions: list[tuple[ObjectEntry, Manifest]],
    others: list[tuple[ObjectEntry, Manifest]],
    keep: int,
    since_s: float,
    pointed: Collection[int],
) -> int:
    return max((record.version for _, record in versions), default=0)


def forget_that_parts_are_in_use(record: Manifest) -> Iterator[str]:
    yield keys.layout_key(record.layout)


def squash_the_second_half_alone(self: _Span, later: _Span) -> _Span:
    return _Span(self.number // 2, self.base, later.end, self.before, later.changes, 0)


def squash_from_the_wrong_version(self: _Span, later: _Span) -> _Span:
    return replace(SPAN_THEN(self, later), base=later.base)


def prune_without_looking_at_pointers(
    store: Store, records: RunReader, versions: list[tuple[ObjectEntry, Manifest]]
) -> list[tuple[Pointer, list[int]]]:
    return []


def prune_every_move_of_a_pointer(records: RunReader, name: str, numbers: list[int], first: int) -> list[str]:
    return [keys.pointer_key(name, number) for number in numbers]


def move_a_pointer_by_overwriting(records: RunReader, move: Pointer, signing_key: SigningKey | None) -> Pointer:
    last = replace(move, number=max(0, move.number - 1))
    line = last.build()
    data = signature.sign(line, signing_key) if signing_key else line
    records.store.put(keys.pointer_key(last.name, last.number), data)
    return last


def move_a_pointer_beyond_the_next_number(records: RunReader, move: Pointer, signing_key: SigningKey | None) -> Pointer:
    return CREATE_MOVE(records, replace(move, number=2 * move.number + 1), signing_key)


def believe_the_hint_at_a_pointer(self: RunReader, name: str, after: int = -1) -> Pointer | None:
    return self.move(name, max(self._hint(keys.pointer_hint(name)), after))


def never_follow_a_pointer_back(self: FollowTarget, records: RunReader, local: int | None) -> Manifest | None:
    found = FOLLOW(self, records, local)
    if self.name is None:
        return found
    numbers = list_moves(records.store)[self.name]
    return records.version(max(move.version for number in numbers if (move := records.move(self.name, number))))


# Of teams: each is a mistake about what several ranks make together, whichever function makes it

WRITE_PATCH, OFFER, COMPLETE_ANCHOR = RunWriter._write_patch, RunWriter._offer, RunWriter._complete_anchor
TABLES_AFTER, SHARE_OF, FAULT_FROM = VersionTables.after, sharding.share_of, team._fault_from


def advance_a_rank_although_the_version_failed(
    self: RunWriter, base: RankBase, fix: Callable[[], PendingVersion], clock: Any
) -> PublishReport:
    try:
        return WRITE_PATCH(self, base, fix, clock)
    except PulseError:
        if self.talk.team.rank == 1 and self._draft is not None:
            base.state.commit(self._draft.transition)
            self._draft = None
        raise


def take_the_version_of_another_publisher_for_ones_own(store: Store, version: int, data: bytes) -> bool:
    try:
        return bool(store.get(keys.manifest_key(version)))
    except NotFoundError:
        return False


def leave_the_last_rank_out_of_an_anchor(self: RunWriter, shares: Iterable[tuple[PartRef, ...]]) -> Manifest:
    return COMPLETE_ANCHOR(self, list(shares)[:-1])


def keep_the_history_at_the_start_of_an_epoch(
    self: VersionTables, reports: Iterable[RankReport], forget: bool = False
) -> VersionTables:
    return TABLES_AFTER(self, reports)


def take_a_rank_that_failed_for_one_without_changes(
    self: RunWriter, base: RankBase, version: PendingVersion, clock: Any
) -> RankReport:
    try:
        return OFFER(self, base, version, clock)
    except StoreError:
        if self.talk.coordinates:
            raise
        assert version.difference is not None
        encoded = version.difference.encode(base.last, self.options.codec)
        self._draft = Draft(base.last.version + 1, *encoded, None)
        return RankReport()


def report_a_part_before_it_is_put(self: RunWriter, part: EncodedPart) -> PartRef:
    if self.talk.coordinates:
        self.store.put(keys.part_key(part.id), part.data)
    return PartRef(part.id, len(part.data))


def send_every_tile_that_a_rank_has(layout: Layout, owners: Mapping[int, int], rank: int, shards: Shards) -> TileShare:
    held = shards.weights(layout).places
    return SHARE_OF(layout, {tile: rank if tile in held else owner for tile, owner in owners.items()}, rank, shards)


def report_failures_of_others_as_of_rank_0(data: bytes, failed: int, rank: int) -> PulseError:
    return FAULT_FROM(data, 0, rank)


FAULTS = [
    PlantedFault(pruning, "_pointers", prune_without_looking_at_pointers, Invariant.POINTER),
    PlantedFault(pruning, "_old_moves", prune_every_move_of_a_pointer, Invariant.POINTER),
    PlantedFault(pointing, "_create", move_a_pointer_by_overwriting, Invariant.IMMUTABLE_OBJECTS),
    PlantedFault(pointing, "_create", move_a_pointer_beyond_the_next_number, Invariant.POINTER),
    PlantedFault(RunReader, "pointer", believe_the_hint_at_a_pointer, Invariant.POINTER),
    PlantedFault(FollowTarget, "find", never_follow_a_pointer_back, Invariant.POINTER),
    PlantedFault(RunWriter, "_create", advance_the_base_before_the_commit, Invariant.PATCH_CONTENT),
    PlantedFault(RunWriter, "_put", write_the_record_before_the_body, Invariant.BODIES_FIRST),
    PlantedFault(writer, "create", take_no_answer_for_a_commit, Invariant.PUBLISH_REPORT),
    PlantedFault(RunWriter, "write", report_the_version_before, Invariant.PUBLISH_REPORT),
    PlantedFault(
        RunWriter, "_advance", forget_that_what_waits_was_compared_with_the_base_before, Invariant.PUBLISHED_STATE
    ),
    PlantedFault(writer, "next_record", begin_an_epoch_too_early, Invariant.VERSION_ORDER),
    PlantedFault(CachedStore, "create", put_what_must_be_created, Invariant.IMMUTABLE_OBJECTS),
    PlantedFault(Subscriber, "_commit", report_before_the_commit, Invariant.WORKER_WEIGHTS),
    PlantedFault(Subscriber, "verify", verify_without_counting, Invariant.VERIFIED_WEIGHTS),
    PlantedFault(Subscriber, "resume", resume_from_any_weights, Invariant.WORKER_WEIGHTS),
    PlantedFault(Subscriber, "_goal", go_to_the_newest_version_instead, Invariant.SYNC_REPORT),
    PlantedFault(RunReader, "check_run", take_a_pruned_run_for_another, Invariant.SAME_RUN),
    PlantedFault(RunReader, "newest", believe_the_head, Invariant.PROGRESS),
    PlantedFault(LiveState, "_prepare", write_before_the_path_was_checked, Invariant.WORKER_WEIGHTS),
    PlantedFault(LiveState, "commit", commit_without_rollback, Invariant.WORKER_WEIGHTS),
    PlantedFault(LiveState, "commit", commit_all_but_the_last_block, Invariant.PUBLISHED_STATE),
    PlantedFault(HostState, "write_change", write_one_of_two_tied_tensors, Invariant.TIED_TENSORS),
    PlantedFault(Snapshot, "block", read_the_live_state, Invariant.ANCHOR_AND_SQUASH_CONTENT),
    PlantedFault(planner, "_squash", use_no_squash, Invariant.JOIN_COST),
    PlantedFault(pruning, "_first_kept", keep_the_newest_version_alone, Invariant.PATH_TO_NEWEST),
    PlantedFault(pruning, "_bodies", forget_that_parts_are_in_use, Invariant.BODIES_FIRST),
    PlantedFault(_Span, "then", squash_the_second_half_alone, Invariant.ANCHOR_AND_SQUASH_CONTENT),
    PlantedFault(_Span, "then", squash_from_the_wrong_version, Invariant.ANCHOR_AND_SQUASH_CONTENT),
    PlantedFault(
        writer,
        "is_committed",
        take_the_version_of_another_publisher_for_ones_own,
        Invariant.VERSION_ORDER,
        teams=1.0,
        simulator=TwoTrainers,
    ),
    *(
        PlantedFault(owner, name, mistake, violates, teams=1.0)
        for owner, name, mistake, violates in (
            (RunWriter, "_write_patch", advance_a_rank_although_the_version_failed, Invariant.PUBLISHED_STATE),
            (
                RunWriter,
                "_complete_anchor",
                leave_the_last_rank_out_of_an_anchor,
                Invariant.ANCHOR_AND_SQUASH_CONTENT,
            ),
            (VersionTables, "after", keep_the_history_at_the_start_of_an_epoch, Invariant.PATCH_CONTENT),
            (RunWriter, "_offer", take_a_rank_that_failed_for_one_without_changes, Invariant.PUBLISHED_STATE),
            (RunWriter, "_put", report_a_part_before_it_is_put, Invariant.BODIES_FIRST),
            (writer, "share_of", send_every_tile_that_a_rank_has, Invariant.PATCH_CONTENT),
            (team, "_fault_from", report_failures_of_others_as_of_rank_0, Invariant.PUBLISH_REPORT),
        )
    ),
]


def seed_that_violates(fault: PlantedFault) -> int | None:
    """The first schedule that ends because the fault's invariant is violated; a crash is raised."""
    for seed in range(SEEDS_FOR_A_FAULT):
        try:
            fault.schedule(seed).run()
        except InvariantError as e:
            if e.invariant is fault.violates:
                return seed
    return None


@pytest.mark.parametrize(
    "fault",  # every third in `make test`: each takes a second or two
    [pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] if n % 3 else []) for n, fault in enumerate(FAULTS)],
)
def test_a_planted_fault_violates_its_invariant(fault: PlantedFault, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patches:
        fault.plant(patches)
        seed = seed_that_violates(fault)
    assert seed is not None, f"{fault.violates.name} holds in {SEEDS_FOR_A_FAULT} schedules with {fault}"
    fault.schedule(seed).run()  # without the fault, the same schedule is a good one


def test_every_invariant_is_violated_by_a_planted_fault() -> None:
    assert {fault.violates for fault in FAULTS} == set(Invariant)


@pytest.mark.parametrize(
    ("name", "mistake", "complaint"),
    [
        ("_moved_elsewhere", lambda self, part: 0, "RunWriter._moved_elsewhere, which does not exist"),
        ("_put", lambda self: 0, r"has the parameters \['self .*\], and RunWriter._put has"),
        ("_put", lambda self, part=None: 0, "part=None"),
        ("_put", lambda self, *, part: 0, "keyword-only"),
    ],
)
def test_a_fault_older_than_the_code_is_not_planted(
    name: str, mistake: Callable[..., Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=complaint):
        PlantedFault(RunWriter, name, mistake, Invariant.PUBLISH_REPORT).plant(monkeypatch)
    assert RunWriter._put is PUT
