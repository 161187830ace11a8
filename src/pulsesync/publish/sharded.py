"""The trainer's end where a model is spread over processes: one version, made of what each of them has put.

    pub = ShardedPublisher("s3://bucket/run", Collective())    # on every rank
    for step in range(steps):
        train_one_step(model)                                  # FSDP2, tensor-parallel, or both
        pub.publish(model, step=step)

Each tile of the run belongs to one rank, which keeps the last version of it and no more, compares, encodes and uploads
it. The ranks tell each other digests and sizes; rank 0, the lead, writes the records. Workers see no difference.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

from pulsesync import errors
from pulsesync.errors import (
    AnotherPublisherError,
    ChainError,
    ConflictError,
    FormatError,
    GroupError,
    NotFoundError,
    PulseError,
    SignatureError,
    StateError,
    StoreError,
    VerificationError,
)
from pulsesync.format import layout as layouts
from pulsesync.format import manifest as manifests
from pulsesync.format import patch
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import FileRef, Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.format.signature import SigningKey
from pulsesync.group.collective import Team
from pulsesync.publish.anchors import anchor_record, encode_parts, path_since_anchor
from pulsesync.publish.baseline import baseline_for
from pulsesync.publish.commit import create, is_committed, next_record, root_record
from pulsesync.publish.companions import Files, put_companions
from pulsesync.publish.ownership import RankReport, TileShare, VersionTables, agreed, share_of
from pulsesync.publish.publisher import (
    PublishReport,
    checked_step,
    find_last,
    reader_of,
    report_of,
    same_tensors,
    signed,
)
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.live import AnyState, AnyTransition
from pulsesync.state.sharding import Shards, Windows, layout_of, owner_of, shards_of, windows_from, windows_to
from pulsesync.store import Store, open_store

COORDINATOR = 0
MAX_FAULT = 1000  # characters of an error that are told to the others

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RankBase:
    """What a rank compares its tiles with: the last version committed, as far as it is this rank's."""

    last: Manifest
    record: bytes  # of last, as stored
    share: TileShare
    state: AnyState


@dataclass(frozen=True)
class _RankDraft:
    """A rank's part of a version that was told to the others, and is perhaps committed."""

    version: int
    part: PartRef | None
    transition: AnyTransition
    spare: EncodedPart | None = None  # where nothing changed: it says so, if a version needs a part
    record: bytes = b""  # the lead's, once it is signed
    tables: VersionTables | None = None  # the lead's, of the version

    def is_of(self, record: Manifest) -> bool:
        return record.version == self.version and (self.part is None or self.part in record.parts)


class ShardedPublisher:
    """Publishes a model that is sharded over a team of processes: into a new run, or an existing one, which is resumed.

    Every rank makes one with the same arguments and calls the same methods in the same order. If one rank fails, no
    rank publishes: the rank that failed raises its own error and the others one of the same kind that names it
    (`failed_rank`), or a GroupError; no base advances, and the next publish covers both steps. If a rank dies, the
    others get a GroupError when the team's timeout is over, which has to be long enough for the slowest rank's upload;
    a new team can then resume the run.

    A run is resumed if each of its tiles lies completely in some rank's shards, as it does with the same team, or with
    fewer and larger shards. Otherwise the full state is published again, in the same run. Anchors are written within
    `publish`, by all ranks concurrently, after the version.

    Args:
        location: A path or URL of the run, or a store.
        team: The processes, such as `Collective(group)`.
        codec: As for `Publisher`.
        cast: As for `Publisher`.
        grid: As for `Publisher`. Tiles end where shards do; the grid can cut them further.
        min_tile: As for `Publisher`.
        signing_key: As for `Publisher`; rank 0 signs.
        files: As for `Publisher`.
        anchor_every: As for `Publisher`.
        epoch_patches: As for a `Subscriber`.

    Raises:
        ValueError: an argument is not one of its choices, or a location that no store is for.
    """

    def __init__(
        self,
        location: str | Store,
        team: Team,
        *,
        codec: patch.CodecName = "auto",
        cast: str | Mapping[str, str] | None = None,
        grid: layouts.Grid | None = None,
        min_tile: int = 1 << 20,
        signing_key: SigningKey | None = None,
        files: Files | None = None,
        anchor_every: float = 1.0,
        epoch_patches: int = EPOCH_PATCHES,
    ) -> None:
        if codec not in get_args(patch.CodecName):
            raise ValueError(f"codec must be one of {', '.join(map(repr, get_args(patch.CodecName)))}; got {codec!r}")
        self.store = open_store(location) if isinstance(location, str) else location
        self.team = team
        self._epoch_patches = epoch_patches
        self.codec: patch.CodecName = codec
        self.cast = {"*": cast} if isinstance(cast, str) else dict(cast or {})
        self.grid, self.min_tile = dict(grid or {}), min_tile
        self.signing_key, self.anchor_every = signing_key, anchor_every
        self._files = dict(files or {})
        self._gathers = 0  # in this publish
        self._lost: AnotherPublisherError | None = None
        self._base: _RankBase | None = None
        self._draft: _RankDraft | None = None  # until it is known what became of it
        # What follows is the lead's alone
        self._tables = VersionTables()
        self._refs: tuple[FileRef, ...] = ()
        self._newest: int | None = None  # epoch of the newest anchor
        self._path_bytes = 0.0  # patches since then

    # For people

    def publish(self, source: Any, *, step: int = 0) -> PublishReport:
        """Publish the team's model as the next version; the first one whole. All ranks call it, each with its shards.

        source: a module, state dict or mapping whose values are DTensors, `Placed`, or tensors that are held whole, in
        host memory or on this rank's GPU. It must not change until this returns. The report is of the whole version;
        its times are this rank's.

        Raises:
            StateError: tensors came, went, changed shape, tie or shard, or nobody holds one; AnotherPublisherError:
            another one publishes here; GroupError: a rank died, fell behind or failed; StoreError. After any of them
            the base is still the last version committed: the next one covers both. A StoreError of the first publish
            can also mean that the version is there and its anchor is not, which the next publish makes up for.
        """
        if self._lost:
            raise self._lost
        clock, self._gathers = _PublishTimes(), 0
        try:
            shards, step = self._begin(source, step)
            if self._base is None:
                plan = self._open(source, shards)
                if self._base is None:
                    return self._publish_root(plan, shards, step, clock)
            return self._publish_patch(self._base, shards, step, clock)
        except AnotherPublisherError as e:
            self._lost = e
            raise

    @property
    def version(self) -> int | None:
        """The last version that was committed."""
        return self._base.last.version if self._base else None

    @property
    def digest(self) -> str | None:
        """The state digest of the last version that was committed."""
        return self._base.last.digest if self._base else None

    @property
    def run(self) -> str | None:
        """The id of the run; None before the first publish."""
        return self._base.last.run if self._base else None

    @property
    def base_bytes(self) -> int:
        """What this rank keeps of the last version."""
        return sum(flat.nbytes for flat in self._base.state.flats.values()) if self._base else 0

    # Acting together

    def _together(self, work: Callable[[], tuple[T, bytes]]) -> tuple[T, list[bytes]]:
        """Do this rank's share of something, and tell the others; return what it gave and what everybody told.

        Raises:
            PulseError: some rank failed: its own error there, one of the same kind or a GroupError elsewhere.
        """
        self._gathers += 1
        place = bytes([self._gathers])
        try:
            value, note = work()
        except BaseException as e:
            with suppress(GroupError):
                self.team.gather(place + _fault_to(e))
            raise
        told = self.team.gather(place + _DONE + note)
        if any(one[:1] != place for one in told):
            raise GroupError("the ranks are not in the same place of a publish: begin it again", rank=self.team.rank)
        for rank, one in enumerate(told):
            if one[1:2] != _DONE:
                raise _fault_from(one[2:], rank, self.team.rank)
        return value, [one[2:] for one in told]

    def _receive(self, work: "Callable[[], _CoordinatorMessage]") -> "_CoordinatorMessage":
        """Let the lead do something, and return what it says of it."""
        _, told = self._together(lambda: (None, work().to_bytes() if self._leads else b""))
        return _CoordinatorMessage.from_bytes(told[COORDINATOR])

    @property
    def _leads(self) -> bool:
        return self.team.rank == COORDINATOR

    def _begin(self, source: Any, step: int) -> tuple[Shards, int]:
        """Read the source; agree on the step, and on what the last version is."""

        def read() -> tuple[Shards, bytes]:
            shards = shards_of(source, self.cast, _read)
            if self._base is not None:
                self._base.share.check(shards)
            due = self._leads and self._base is not None and self._due(self._base.last, self._base.state.layout)
            return shards, json.dumps([checked_step(step), self.version, self._draft is not None, due]).encode()

        shards, told = self._together(read)
        steps, versions, unsure, due = zip(*map(json.loads, told), strict=True)
        if len(set(steps)) > 1:
            raise GroupError(f"the ranks publish different steps: {steps}", rank=self.team.rank)
        if any(unsure):
            self._settle()
            _, told = self._together(lambda: (None, json.dumps(self.version).encode()))
            versions = tuple(map(json.loads, told))
        if len(set(versions)) > 1:
            self._base = None  # some missed what became of the last version: all take the run up anew
        elif due[COORDINATOR] and not any(unsure):
            self._try_anchor()
        return shards, steps[COORDINATOR]

    def _settle(self) -> None:
        """Find out whether a version was committed whose outcome some rank does not know; if so, advance to it."""

        def look() -> _CoordinatorMessage:
            draft = self._draft
            if draft and draft.record and is_committed(self.store, draft.version, draft.record):
                self._advance(draft, draft.record)
            return _CoordinatorMessage(self._base.record if self._base else b"")

        message = self._receive(look)
        if self._draft and message.record and self._draft.is_of(self._parse(message.record)):
            self._advance(self._draft, message.record)
        self._draft = None

    def _advance(self, draft: _RankDraft, record: bytes) -> None:
        """Move the base to a version that was committed."""
        base, last = self._base, self._parse(record)
        assert base is not None
        if base.state.sums is not draft.transition.sums:  # unless it was interrupted between here and the end
            base.state.commit(draft.transition)
        self._base = replace(base, last=last, record=record)
        self._path_bytes += last.size_bytes
        self._tables = draft.tables or self._tables
        self._draft = None

    # Taking up a run

    def _open(self, source: Any, shards: Shards) -> "_TeamPlan":
        """Agree on a layout, and look for a run; if there is one that can be taken up, that is where the base is."""
        _, told = self._together(lambda: (None, windows_to(shards)))
        everyones, ties = agreed([windows_from(note) for note in told])
        layout = layout_of(everyones, ties, self.grid, self.min_tile)
        message = self._receive(lambda: self._find_last(source))
        plan = _TeamPlan(layout, everyones, message.record, self._parse(message.record) if message.record else None)
        if plan.last is not None:
            self._take_up(plan, plan.last, shards)
        return plan

    def _find_last(self, source: Any) -> "_CoordinatorMessage":
        last = find_last(self._reader(), self.signing_key)
        self._refs = put_companions(self.store, self._files, source, last)
        if last is None:
            return _CoordinatorMessage()
        self._newest = last.anchor
        return _CoordinatorMessage(signed(last, self.signing_key))

    def _take_up(self, plan: "_TeamPlan", last: Manifest, shards: Shards) -> None:
        """Rebuild the last version, each rank its own tiles; leave the base alone if that cannot be done."""

        def rebuild() -> tuple[tuple[TileShare, AnyState] | None, bytes]:
            layout = self._reader().layout(last.layout)
            same_tensors(layout, plan.layout.tensors, plan.layout.ties)
            try:
                owners = owner_of(layout, plan.everyones)
            except StateError:
                return None, b""  # the run's tiles lie across the shards of this team
            share = share_of(layout, owners, self.team.rank, shards)
            state = self._rebuild(last, share, shards)
            return ((share, state), RankReport.of(state, share).to_bytes()) if state else (None, b"")

        found, told = self._together(rebuild)
        if found is None or not all(told):
            return
        message = self._receive(lambda: self._judge(plan, last, found[0].layout, told))
        if message.record:
            self._base = _RankBase(last, plan.record, *found)
            if message.anchor:
                self._try_anchor()

    def _rebuild(self, last: Manifest, share: TileShare, shards: Shards) -> AnyState | None:
        """This rank's tiles of the last version, or None if no published way leads there."""
        tensors = share.keeper.tensors(share, shards.published)
        trust = self.signing_key.public if self.signing_key else None
        reader = Subscriber(self.store, trust=trust, slices=share.slices, undo=0, epoch_patches=self._epoch_patches)
        try:
            reader.sync(tensors, version=last.version)
        except SignatureError:
            raise
        except (ChainError, NotFoundError, FormatError, VerificationError):
            return None
        if reader.state is None or reader.version != last.version:
            return None
        return share.keeper.adopt(share, reader.state)

    def _judge(self, plan: "_TeamPlan", last: Manifest, layout: Layout, told: Sequence[bytes]) -> "_CoordinatorMessage":
        """Say whether what all ranks have rebuilt is, together, the last version."""
        tables = VersionTables().after(RankReport.from_ranks(told))
        start = last.at_start  # there nothing that was remembered is needed any more
        if tables.digest(layout) != last.digest or (not start and tables.history(last.index) != last.history):
            return _CoordinatorMessage()
        self._tables = tables
        self._path_bytes = self._path_since_anchor(last)
        return _CoordinatorMessage(plan.record, anchor=self._due(last, layout))

    def _reader(self) -> RunReader:
        return reader_of(self.store, self.signing_key, self._epoch_patches)

    def _parse(self, record: bytes) -> Manifest:
        """A record of this run, which the coordinator has checked."""
        return manifests.parse(record, epoch_patches=self._epoch_patches)

    # Roots

    def _publish_root(self, plan: "_TeamPlan", shards: Shards, step: int, clock: "_PublishTimes") -> PublishReport:
        """Publish a state that has no base, and its anchor."""

        def copy() -> tuple[tuple[TileShare, AnyState], bytes]:
            share = share_of(plan.layout, owner_of(plan.layout, plan.everyones), self.team.rank, shards)
            state = share.keeper.copy(share, shards.published)
            clock.encoded()
            return (share, state), RankReport.of(state, share).to_bytes()

        found, told = self._together(copy)
        message = self._receive(lambda: self._create_root(plan, told, step))
        self._base = _RankBase(self._parse(message.record), message.record, *found)
        written = message.written + self._write_anchor(self._base)
        return clock.report(plan.layout, self._base.last, None, written)

    def _create_root(self, plan: "_TeamPlan", told: Sequence[bytes], step: int) -> "_CoordinatorMessage":
        tables = VersionTables().after(RankReport.from_ranks(told))
        digest = tables.digest(plan.layout)
        record = root_record(plan.last, step, plan.layout.id, digest, self._newest, self._refs, self._epoch_patches)
        data = signed(record, self.signing_key)
        self.store.put(keys.layout_key(plan.layout.id), plan.layout.data)
        written = len(plan.layout.data) + create(self.store, record, data, plan.last)
        self._tables, self._path_bytes = tables, math.inf
        return _CoordinatorMessage(data, written=written)

    # Patches

    def _publish_patch(self, base: _RankBase, shards: Shards, step: int, clock: "_PublishTimes") -> PublishReport:
        """Find and put what changed, each rank in its own tiles; commit it as one version; move the bases."""
        _, told = self._together(lambda: (None, self._offer(base, shards, clock).to_bytes()))
        message = self._receive(lambda: self._create(base, told, step))
        if self._draft is not None:  # the lead is there already
            self._advance(self._draft, message.record)
        report = clock.report(base.state.layout, self._parse(message.record), message.changed, message.written)
        if message.anchor:
            self._try_anchor()
        return report

    def _offer(self, base: _RankBase, shards: Shards, clock: "_PublishTimes") -> RankReport:
        """Encode what changed in this rank's tiles, and put it; nothing is put where nothing has changed."""
        share = base.share
        difference = share.keeper.compare(share, base.state, shards.published, self.codec, base.last)
        part, transition = difference.encode(base.last, self.codec)
        clock.encoded()
        ref, spare = (self._put(part), None) if part.sums else (None, part)
        self._draft = _RankDraft(base.last.version + 1, ref, transition, spare)
        remembered = transition.history.counts(part.sums)
        return RankReport((ref,) if ref else (), transition.changed, part.sums, remembered)

    def _create(self, base: _RankBase, told: Sequence[bytes], step: int) -> "_CoordinatorMessage":
        """Make a version of what all have put. If nothing has changed anywhere, it has one part that says so."""
        offers = list(RankReport.from_ranks(told))
        parts = tuple(part for offer in offers for part in offer.parts)
        assert self._draft is not None
        if not parts:
            assert self._draft.spare is not None
            parts = (self._put(self._draft.spare),)
        _, index = base.last.next_patch
        tables = self._tables.after(offers, forget=index == 1)
        state = tables.digest(base.state.layout)
        record = next_record(base.last, step, parts, state, tables.history(index), self._newest, self._refs)
        data = signed(record, self.signing_key)
        self._draft = replace(self._draft, record=data, tables=tables)
        written = record.size_bytes + create(self.store, record, data, base.last)
        self._advance(self._draft, data)
        due = self._due(record, base.state.layout)
        return _CoordinatorMessage(data, due, sum(offer.changed for offer in offers), written)

    def _put(self, part: EncodedPart) -> PartRef:
        self.store.put(keys.part_key(part.id), part.data)
        return PartRef(part.id, len(part.data))

    # Anchors

    def _due(self, last: Manifest, layout: Layout) -> bool:
        """Whether an anchor of the last version is to be written: at an epoch's start, if the way has grown long."""
        if not last.at_start or self._newest == last.starts:
            return False
        longest = self.anchor_every * layout.size_bytes
        if longest <= self._path_bytes < math.inf:
            try:
                self._path_bytes = self._path_since_anchor(last)
            except StoreError as e:  # then by what was counted here
                logger.info("The path from the newest anchor could not be measured: %s", e)
        return self._path_bytes >= longest

    def _path_since_anchor(self, last: Manifest) -> float:
        newest, path_bytes = path_since_anchor(last, self._reader().look)
        if newest is not None:
            self._newest = max(newest, self._newest or 0)
        return path_bytes

    def _try_anchor(self) -> None:
        """Write an anchor, or leave it to a later publish: anchors can wait, versions cannot."""
        assert self._base is not None
        try:
            self._write_anchor(self._base)
        except StoreError as e:
            logger.warning(
                "The anchor of epoch %d is not in the store: %s. It is tried again with a later version.",
                self._base.last.starts,
                e,
            )

    def _write_anchor(self, base: _RankBase) -> int:
        """Write the whole state of the last version, each rank its own tiles; return the bytes of all."""

        def put() -> tuple[None, bytes]:
            parts = encode_parts(base.share.tiles, base.state) if base.share.tiles else ()
            return None, RankReport(tuple(self._put(part) for part in parts)).to_bytes()

        _, told = self._together(put)
        return self._receive(lambda: self._create_anchor(base, told)).written

    def _create_anchor(self, base: _RankBase, told: Sequence[bytes]) -> "_CoordinatorMessage":
        parts = tuple(part for report in RankReport.from_ranks(told) for part in report.parts)
        if not parts:
            parts = tuple(self._put(part) for part in encode_parts((), base.state))
        record = anchor_record(base.last, parts, self._newest)
        data = signed(record, self.signing_key)
        with suppress(ConflictError):  # another process was quicker: the run has its anchor
            self.store.create(keys.anchor_key(base.last.starts), data)
        self._newest, self._path_bytes = base.last.starts, 0.0
        return _CoordinatorMessage(data, written=record.size_bytes)


def _read(tensors: Mapping[str, Any], cast: Mapping[str, str]) -> tuple[Any, Mapping[str, str]]:
    """Shards as plain tensors, in host memory or on a GPU."""
    return baseline_for(tensors, None).read(tensors, cast)


class _PublishTimes:
    """Times of one rank in one publish."""

    def __init__(self) -> None:
        self.began = self.ready = time.perf_counter()

    def encoded(self) -> None:
        self.ready = time.perf_counter()

    def report(self, layout: Layout, record: Manifest, changed: int | None, written: int) -> PublishReport:
        now = time.perf_counter()
        encode_s, store_s = self.ready - self.began, now - self.ready
        return report_of(layout, record, changed, written, 0, now - self.began, encode_s, store_s)


@dataclass(frozen=True)
class _TeamPlan:
    """What a team needs to begin: how its tensors would be cut, who holds what, and the last version of the run."""

    layout: Layout
    everyones: Sequence[Windows]
    record: bytes  # of last, as stored
    last: Manifest | None


# What ranks tell each other

_DONE, _FAILED = b"+", b"-"


def _fault_to(error: BaseException) -> bytes:
    retryable = isinstance(error, StoreError) and error.retryable
    fault = {"kind": type(error).__name__, "text": str(error)[:MAX_FAULT], "retryable": retryable}
    return _FAILED + json.dumps(fault).encode()


def _fault_from(data: bytes, failed: int, rank: int) -> PulseError:
    """What stopped another rank, as an error of the same kind where it is one of this library's."""
    fault = json.loads(data)
    kind = getattr(errors, fault["kind"], None)
    if not isinstance(kind, type) or not issubclass(kind, PulseError):
        return GroupError(f"rank {failed} failed: {fault['kind']}: {fault['text']}", rank=rank, failed_rank=failed)
    error = kind(f"rank {failed} failed: {fault['text']}")
    error.failed_rank = failed
    if isinstance(error, StoreError):
        error.retryable = fault["retryable"]
    return error


@dataclass(frozen=True)
class _CoordinatorMessage:
    """What the lead tells the others."""

    record: bytes = b""  # of the last version, as stored
    anchor: bool = False  # one is to be written now
    changed: int = 0  # weights, over all ranks
    written: int = 0  # bytes, by all ranks

    def to_bytes(self) -> bytes:
        head = json.dumps([self.anchor, self.changed, self.written]).encode() + b"\n"
        return head + self.record

    @classmethod
    def from_bytes(cls, data: bytes) -> "_CoordinatorMessage":
        head, _, record = data.partition(b"\n")
        anchor, changed, written = json.loads(head)
        return cls(record, anchor, changed, written)
