"""Mistakes that could be made in this library, which the simulator must find: each violates one invariant.

python -m tests.simulator.faults     # prints a short schedule for each that its own does not find any more
"""

import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pulsesync import PublishReport
from pulsesync.core.types import Bits, BlockChange, Tile
from pulsesync.errors import ConflictError, NotFoundError, PulseError, RunRolledBackError, StoreError
from pulsesync.format import signature
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import FileRef, Manifest, PartRef
from pulsesync.format.patch import CodecName, EncodedPart
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import SigningKey
from pulsesync.maintain import point as pointing
from pulsesync.maintain import prune as pruning
from pulsesync.maintain.squash import _Span
from pulsesync.publish import commit, committed, writer
from pulsesync.publish.anchors import AnchorWriter
from pulsesync.publish.baseline import HostDifference, RankBase
from pulsesync.publish.committed import Draft
from pulsesync.publish.ownership import RankReport, VersionTables
from pulsesync.publish.pending import PendingVersion
from pulsesync.publish.writer import RunWriter
from pulsesync.run import keys, planner
from pulsesync.run.follower import RunFollower
from pulsesync.run.goals import GoalFinder
from pulsesync.run.planner import Look, Position
from pulsesync.run.pointers import list_moves
from pulsesync.run.reader import RunReader
from pulsesync.state import sharding
from pulsesync.state.backend import Transition
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import Shards, TileShare
from pulsesync.state.weights import Snapshot, WeightState
from pulsesync.store import ObjectEntry, Store, WrappedStore
from tests.helpers import weights_of
from tests.publishers import Publisher, ShardedPublisher
from tests.readers import Subscriber
from tests.simulator import TEAMS, Invariant, InvariantError, RunSimulator

EVENTS, SEEDS = 40, 80  # of the longest schedules that look for a fault; the rarest is met by 13 of 160


class TwoTrainers(RunSimulator):
    """Schedules in which two trainers publish into the same run, and little else happens."""

    def _draw(self) -> str:
        if len(self.world.trainers) < 2:
            return "a second trainer"
        return self.world.rng.choice(["train", "publish", "publish", "publish"])


@dataclass(frozen=True)
class PlantedFault:
    """A mistake, the invariant that it must violate, and a schedule in which it does.

    Args:
        name: Of the mistake.
        violates: The invariant.
        found_by: The seed and the number of events of a short schedule that finds it.
        teams: How often a trainer is a team in the schedules that find it.
        simulator: The class of these schedules.
        classes: What a simulator is given with the mistake, such as `publisher`.
        replaces: The class or module, and the name of its function that the mistake replaces, if it is in the library.
        mistake: What is there instead. It must have the same parameters.
    """

    name: str
    violates: Invariant
    found_by: tuple[int, int]
    teams: float = TEAMS
    simulator: type[RunSimulator] = RunSimulator
    classes: Mapping[str, Any] = field(default_factory=dict)
    replaces: tuple[Any, str] | None = None
    mistake: Callable[..., Any] | None = None

    def __str__(self) -> str:
        return self.name

    def schedule(self, seed: int, events: int) -> RunSimulator:
        """A schedule without the mistake."""
        return self.simulator(seed, events=events, teams=self.teams)

    def is_found_by(self, seed: int, events: int) -> bool:
        """Whether a schedule with the mistake ends because its invariant is violated. A crash is raised."""
        with pytest.MonkeyPatch.context() as patches:
            self.plant(patches)
            try:
                self.simulator(seed, events=events, teams=self.teams, **self.classes).run()
            except InvariantError as e:
                return e.invariant is self.violates
        return False

    def find(self) -> tuple[int, int] | None:
        """The seed and the number of events of the first schedule that finds it."""
        for events, seeds in ((8, 30), (16, 30), (EVENTS, SEEDS)):
            for seed in range(seeds):
                if self.is_found_by(seed, events):
                    return seed, events
        return None

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the function. Raises: AssertionError, if this fault is older than the code it is planted in."""
        if self.replaces is None or self.mistake is None:
            return
        owner, name = self.replaces
        where = f"{owner.__name__}.{name}"
        assert name in vars(owner), f"{self} replaces {where}, which does not exist"
        real, planted = parameters(getattr(owner, name)), parameters(self.mistake)
        assert planted == real, f"{self} has the parameters {planted}, and {where} has {real}"
        monkeypatch.setattr(owner, name, self.mistake)


def replacing(
    owner: Any, name: str, mistake: Callable[..., Any], violates: Invariant, *found_by: int, **options: Any
) -> PlantedFault:
    """A mistake in place of one function of the library."""
    found = found_by[0], found_by[1]
    return PlantedFault(mistake.__name__, violates, found, replaces=(owner, name), mistake=mistake, **options)


def using(name: str, classes: Mapping[str, Any], violates: Invariant, *found_by: int, **options: Any) -> PlantedFault:
    """A mistake in what a simulator is given: nothing in the library is replaced."""
    return PlantedFault(name, violates, (found_by[0], found_by[1]), classes=classes, **options)


def parameters(function: Callable[..., Any]) -> list[str]:
    """Names, kinds and defaults, without types."""
    found = inspect.signature(function).parameters.values()
    return [f"{one.replace(annotation=one.empty)} ({one.kind.description})" for one in found]


# Mistakes in what a simulator is given


class WithoutParts(WrappedStore):
    def put(self, key: str, data: bytes | memoryview) -> None:
        if not key.startswith("parts/"):
            super().put(key, data)


class TakesNoAnswerForACommit(WrappedStore):
    def create(self, key: str, data: bytes) -> None:
        try:
            super().create(key, data)
        except ConflictError:
            raise
        except StoreError:
            if not key.startswith("manifests/"):
                raise


class PutsWhatMustBeCreated(WrappedStore):
    def create(self, key: str, data: bytes) -> None:
        self.store.put(key, data)


class ReportsTheVersionBefore(Publisher):
    def publish(self, source: Any, **options: Any) -> Any:
        report = super().publish(source, **options)
        if isinstance(report, PublishReport) and report.version is not None:
            return replace(report, version=report.version - 1)
        return report


class VerifiesWithoutCounting(Subscriber):
    def verify(self, source: Any | None = None) -> str:
        assert self.state is not None
        return self.state.digest


class GoesToTheNewestVersionInstead(Subscriber):
    def sync(self, source: Any, version: int | None = None, **options: Any) -> Any:
        return super().sync(source, **options)


class ReportsFailuresOfOthersAsOfRank0(ShardedPublisher):
    def publish(self, source: Any, **options: Any) -> Any:
        try:
            return super().publish(source, **options)
        except PulseError as e:
            if getattr(e, "failed_rank", None) is not None:
                e.failed_rank = 0
            raise


def publisher_with(store: Callable[[Store], Store]) -> dict[str, Any]:
    return {"publisher": lambda location, **options: Publisher(store(location), **options)}


def other_ranks_with(store: Callable[[Store], Store]) -> dict[str, Any]:
    """A team whose rank 0 alone has a right store."""
    return {
        "sharded": lambda location, team, **options: ShardedPublisher(
            store(location) if team.rank else location, team, **options
        )
    }


# Mistakes in the library

RESUME, STATE_COMMIT, DECODE, SPAN_THEN = RunFollower.resume, WeightState.commit, HostBackend.decode, _Span.then
ENCODE = HostDifference.encode
NEXT_RECORD = commit.next_record
CREATE_MOVE, FOLLOW = pointing._create, GoalFinder._find_followed


def advance_the_base_before_the_commit(
    self: HostDifference, last: Manifest, codec: CodecName
) -> tuple[EncodedPart, Transition]:
    part, transition = ENCODE(self, last, codec)
    self.state.commit(transition)
    return part, transition


def forget_that_what_waits_was_compared_with_the_last_base(self: HostDifference, done: Transition) -> HostDifference:
    return self


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


def take_what_was_rolled_back_for_committed(self: WeightState, transition: Transition) -> Transition:
    try:
        return STATE_COMMIT(self, transition)
    except BaseException:
        self.sums, self.history, self.position = transition.sums, transition.history, transition.position
        raise


def resume_from_any_weights(self: RunFollower, source: Any, version: int, history: bytes | None) -> bool:
    record = RunReader(self.store, self.trust).version(version)
    if record is None:
        return False
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(WeightState, "digest", record.digest)  # whatever the weights are
        return RESUME(self, source, version, history)


def take_a_pruned_run_for_another(
    self: RunReader, run: str, version: int, digest: str, advice: str = planner.START_OVER
) -> None:
    if self.version(version) is None:
        raise RunRolledBackError("the local version is gone", version=version, run=run)


def write_before_the_path_was_checked(self: HostBackend, versions: Any, after: Any, history: Any) -> Any:
    found = DECODE(self, versions, after, history)
    self.write(found.changes)
    return found


def commit_without_rollback(self: WeightState, transition: Transition) -> Transition:
    back = Transition({}, self.sums, self.history, 0, self.position)
    self.backend.write(transition.changes)
    self.sums, self.history, self.position = transition.sums, transition.history, transition.position
    return back


def commit_all_but_the_last_block(self: WeightState, transition: Transition) -> Transition:
    changes = dict(list(transition.changes.items())[:-1])
    return STATE_COMMIT(self, replace(transition, changes=changes))


def write_one_of_two_tied_tensors(self: HostBackend, ordinal: int, change: BlockChange) -> None:
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


def never_follow_a_pointer_back(self: GoalFinder, records: RunReader, local: int | None) -> Manifest | None:
    found = FOLLOW(self, records, local)
    if self.pointer is None:
        return found
    numbers = list_moves(records.store)[self.pointer]
    return records.version(max(move.version for number in numbers if (move := records.move(self.pointer, number))))


# Of teams: each is a mistake about what several ranks make together, whichever function makes it

ENCODE_TILES, COMPLETE_ANCHOR = RunWriter._encode, AnchorWriter.complete
TABLES_AFTER, SHARE_OF = VersionTables.after, sharding.share_of


def advance_a_rank_whatever_becomes_of_the_version(
    self: HostDifference, last: Manifest, codec: CodecName
) -> tuple[EncodedPart, Transition]:
    part, transition = ENCODE(self, last, codec)
    if threading.current_thread().name == "rank 1":
        self.state.commit(transition)
    return part, transition


def take_the_version_of_another_publisher_for_ones_own(store: Store, version: int, data: bytes) -> bool:
    try:
        return bool(store.get(keys.manifest_key(version)))
    except NotFoundError:
        return False


def leave_a_part_out_of_an_anchor(self: AnchorWriter, parts: tuple[PartRef, ...]) -> Manifest:
    return COMPLETE_ANCHOR(self, parts[:-1])


def keep_the_history_at_the_start_of_an_epoch(
    self: VersionTables, reports: Iterable[RankReport], forget: bool = False
) -> VersionTables:
    return TABLES_AFTER(self, reports)


def take_a_rank_that_failed_for_one_without_changes(
    self: RunWriter, base: RankBase, version: PendingVersion, clock: Any
) -> RankReport:
    try:
        return ENCODE_TILES(self, base, version, clock)
    except StoreError:
        if self.rounds.coordinates:
            raise
        assert version.difference is not None
        encoded = version.difference.encode(base.last, self.agreement.codec)
        self.settler.draft = Draft(base.last.version + 1, *encoded, None)
        return RankReport()


def send_every_tile_that_a_rank_has(layout: Layout, owners: Mapping[int, int], rank: int, shards: Shards) -> TileShare:
    held = weights_of(shards, layout).places
    return SHARE_OF(layout, {tile: rank if tile in held else owner for tile, owner in owners.items()}, rank, shards)


FAULTS = [
    replacing(pruning, "_pointers", prune_without_looking_at_pointers, Invariant.POINTER, 24, 8),
    replacing(pruning, "_old_moves", prune_every_move_of_a_pointer, Invariant.POINTER, 0, 8),
    replacing(pointing, "_create", move_a_pointer_by_overwriting, Invariant.IMMUTABLE_OBJECTS, 1, 8),
    replacing(pointing, "_create", move_a_pointer_beyond_the_next_number, Invariant.POINTER, 1, 8),
    replacing(RunReader, "pointer", believe_the_hint_at_a_pointer, Invariant.POINTER, 8, 8),
    replacing(GoalFinder, "_find_followed", never_follow_a_pointer_back, Invariant.POINTER, 1, 8),
    replacing(HostDifference, "encode", advance_the_base_before_the_commit, Invariant.PATCH_CONTENT, 49, 38),
    using("write_the_record_before_the_body", publisher_with(WithoutParts), Invariant.BODIES_FIRST, 0, 8),
    using("take_no_answer_for_a_commit", publisher_with(TakesNoAnswerForACommit), Invariant.PUBLISH_REPORT, 12, 1),
    using("report_the_version_before", {"publisher": ReportsTheVersionBefore}, Invariant.PUBLISH_REPORT, 1, 1),
    replacing(
        HostDifference, "after", forget_that_what_waits_was_compared_with_the_last_base, Invariant.PUBLISHED_STATE, 6, 7
    ),
    replacing(writer, "next_record", begin_an_epoch_too_early, Invariant.VERSION_ORDER, 1, 8),
    using("put_what_must_be_created", publisher_with(PutsWhatMustBeCreated), Invariant.IMMUTABLE_OBJECTS, 1, 1),
    replacing(WeightState, "commit", take_what_was_rolled_back_for_committed, Invariant.WORKER_WEIGHTS, 23, 40),
    using("verify_without_counting", {"subscriber": VerifiesWithoutCounting}, Invariant.VERIFIED_WEIGHTS, 18, 8),
    replacing(RunFollower, "resume", resume_from_any_weights, Invariant.WORKER_WEIGHTS, 23, 28),
    using(
        "go_to_the_newest_version_instead", {"subscriber": GoesToTheNewestVersionInstead}, Invariant.SYNC_REPORT, 21, 7
    ),
    replacing(RunReader, "check_run", take_a_pruned_run_for_another, Invariant.SAME_RUN, 2, 8),
    replacing(RunReader, "newest", believe_the_head, Invariant.PROGRESS, 1, 8),
    replacing(HostBackend, "decode", write_before_the_path_was_checked, Invariant.WORKER_WEIGHTS, 64, 34),
    replacing(WeightState, "commit", commit_without_rollback, Invariant.WORKER_WEIGHTS, 8, 8),
    replacing(WeightState, "commit", commit_all_but_the_last_block, Invariant.PUBLISHED_STATE, 1, 8),
    replacing(HostBackend, "write_change", write_one_of_two_tied_tensors, Invariant.TIED_TENSORS, 0, 8),
    replacing(Snapshot, "block", read_the_live_state, Invariant.ANCHOR_AND_SQUASH_CONTENT, 4, 8),
    replacing(planner, "_squash", use_no_squash, Invariant.JOIN_COST, 1, 8),
    replacing(pruning, "_first_kept", keep_the_newest_version_alone, Invariant.PATH_TO_NEWEST, 3, 8),
    replacing(pruning, "_bodies", forget_that_parts_are_in_use, Invariant.BODIES_FIRST, 3, 36),
    replacing(_Span, "then", squash_the_second_half_alone, Invariant.ANCHOR_AND_SQUASH_CONTENT, 1, 8),
    replacing(_Span, "then", squash_from_the_wrong_version, Invariant.ANCHOR_AND_SQUASH_CONTENT, 25, 8),
    replacing(
        committed,
        "is_committed",
        take_the_version_of_another_publisher_for_ones_own,
        Invariant.VERSION_ORDER,
        2,
        16,
        teams=1.0,
        simulator=TwoTrainers,
    ),
    # Of teams
    replacing(
        HostDifference,
        "encode",
        advance_a_rank_whatever_becomes_of_the_version,
        Invariant.PUBLISHED_STATE,
        4,
        16,
        teams=1.0,
    ),
    replacing(
        AnchorWriter, "complete", leave_a_part_out_of_an_anchor, Invariant.ANCHOR_AND_SQUASH_CONTENT, 2, 1, teams=1.0
    ),
    replacing(
        VersionTables, "after", keep_the_history_at_the_start_of_an_epoch, Invariant.PATCH_CONTENT, 0, 8, teams=1.0
    ),
    replacing(
        RunWriter,
        "_encode",
        take_a_rank_that_failed_for_one_without_changes,
        Invariant.PUBLISHED_STATE,
        25,
        35,
        teams=1.0,
    ),
    using("report_a_part_before_it_is_put", other_ranks_with(WithoutParts), Invariant.BODIES_FIRST, 0, 8, teams=1.0),
    replacing(writer, "share_of", send_every_tile_that_a_rank_has, Invariant.PATCH_CONTENT, 2, 16, teams=1.0),
    using(
        "report_failures_of_others_as_of_rank_0",
        {"sharded": ReportsFailuresOfOthersAsOfRank0},
        Invariant.PUBLISH_REPORT,
        9,
        8,
        teams=1.0,
    ),
]


if __name__ == "__main__":
    logging.disable()
    for fault in FAULTS:
        if not fault.is_found_by(*fault.found_by):
            print(f"{fault}: {fault.find() or 'not found'}", flush=True)
