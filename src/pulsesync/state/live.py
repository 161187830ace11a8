"""The transaction on live weights, in host memory or on a GPU. All writes to the weights of a run go through here.

Applying versions is a transaction: everything is read, checked and decoded, and the digest of the result is known,
before the first weight changes; if writing then fails, what was written is rolled back. Several versions can be
prepared on top of each other and committed at once. The blocks of an anchor that differ from the weights are staged
until all of the anchor is checked.

`LiveState` has the rules. A backend does the work in a few methods: `state.host` in host memory,
`device.state` on a GPU.
"""

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

from pulsesync.core import digest
from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import BaseMismatchError, FormatError, PulseError, VerificationError
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.patch import HistoryLookup, WholeBlock
from pulsesync.state.attach import MatchedTensors, match_tensors
from pulsesync.state.claims import check_claim
from pulsesync.state.slices import Slices, TileStorage, find_places
from pulsesync.state.staging import StagedBlocks
from pulsesync.state.views import SourceMarks

Flat = TypeVar("Flat")  # a tensor as a backend reads and writes it
Delta = TypeVar("Delta")  # changes of weights: positions, old bits and new bits
Memory = TypeVar("Memory", bound=HistoryLookup)  # the history of an epoch
Parts: TypeAlias = Sequence[bytes | memoryview | Body]  # of a version, in the order of its record


@dataclass(frozen=True)
class Transition(ABC, Generic[Delta, Memory]):
    """The step from the live state to another, ready to be committed."""

    changes: Delta
    sums: Mapping[int, Sum]  # after it, of all local tiles
    history: Memory  # after it

    @property
    @abstractmethod
    def changed(self) -> int:
        """How many weights it changes."""


@dataclass(frozen=True)
class VersionChanges(Generic[Delta, Memory]):
    """The changes of consecutive versions, each decoded against the weights that the one before it yields."""

    changes: Delta  # of all of them, and of the changes that they were decoded after
    digest_changes: Sequence[Mapping[int, Sum]]  # for each version: of the tiles in it, by ordinal
    history: Memory | None  # after the last; None if none was given
    history_digests: Sequence[str | None]  # for each version: of the history after it, if the state is whole
    fault: PulseError | None = None  # of the first version that cannot be decoded; the lists end before it


class BlockSums(NamedTuple):
    """The digests of one block of a tile."""

    all: Sum
    local: Sum  # counting weights that are not local as zeros


class LiveState(ABC, Generic[Flat, Delta, Memory]):
    """The tensors of one process, in the layout of a run.

    One thread at a time changes it; `snapshot` and `recount` may run concurrently. Nothing else may write the weights
    while it is in use; `recount` detects it.
    """

    overlays: ClassVar[bool]  # whether a patch can be prepared over a transition that is not committed yet
    widens: ClassVar[bool]  # whether BF16 tensors of a run can be FP32 tensors in the model

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, Flat],
        copies: Mapping[str, Sequence[Flat]] | None = None,
        slices: Slices | None = None,
        places: Mapping[int, TileStorage] | None = None,
        sums: Mapping[int, Sum] | None = None,
    ) -> None:
        self.layout = layout
        self.flats = dict(flats)  # canonical name -> weights
        self.copies = dict(copies or {})  # canonical name -> tied tensors that have memory of their own
        self.places: Mapping[int, TileStorage] = find_places(layout, slices or {}) if places is None else places
        self.whole = all(tile.ordinal in self.places or not tile.size for tile in layout.tiles) and all(
            place.whole for place in self.places.values()
        )
        self.history = self.to_backend(History())
        self.torn = False  # whether an anchor is written in part: the weights are between two versions
        self.lock = threading.RLock()
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.superseded = False  # whether another state of this process has claimed some of the memory since
        self._addresses: Mapping[str, int] = {}
        self._marks: SourceMarks | None = None  # of the source, when its addresses were these
        self._digested: tuple[Mapping[int, Sum], str] | None = None  # the last one computed
        self.sums: Mapping[int, Sum] = self.count() if sums is None else sums
        self.differing_tie = self.find_differing_tie()  # a tensor whose tied copy differs: only an anchor repairs it

    # The methods of a backend

    @staticmethod
    @abstractmethod
    def views(source: Any) -> Mapping[str, Any]:
        """The tensors of a source under all their names, tied ones too."""

    @staticmethod
    @abstractmethod
    def span(flat: Flat) -> tuple[int, int]:
        """The addresses at which weights begin and end."""

    @staticmethod
    @abstractmethod
    def equal(a: Flat, b: Flat) -> bool:
        """Whether two tensors have the same bits."""

    @abstractmethod
    def to_backend(self, history: History) -> Memory:
        """A history in host memory, in the form of this backend."""

    @abstractmethod
    def no_changes(self) -> Transition[Delta, Memory]:
        """The transition that changes nothing."""

    @abstractmethod
    def block(self, tile: Tile, number: int) -> Bits:
        """Read a block of a tile. The result must not be written; it may be a view."""

    @abstractmethod
    def amended_block(self, tile: Tile, number: int, changes: Delta) -> Bits:
        """Read a block as it is after some changes, in memory of its own."""

    @abstractmethod
    def count_tiles(self, tiles: Sequence[Tile]) -> Mapping[int, Sum]:
        """Count the digests of local tiles of a batch; of a partly local tile, as if the rest were zeros."""

    @abstractmethod
    def decode(
        self, versions: Sequence[Sequence[Body]], after: Delta, history: Memory | None
    ) -> VersionChanges[Delta, Memory]:
        """Decode the local tiles of consecutive versions; the first applies to the weights after the given changes.

        All are patches of one epoch. A backend that cannot prepare patches over each other is given one version, and no
        changes. The given changes may be modified and returned.

        Raises:
            StateError: a local slice splits a tile. Bad bytes may be raised if there is one version; for a version that
            follows another they are always its `fault`.
        """

    @abstractmethod
    def inverse(self, changes: Delta) -> Delta:
        """The changes that undo these."""

    @abstractmethod
    def compose(self, first: Delta, then: Delta) -> Delta:
        """Two sets of changes, one after the other, as one."""

    @abstractmethod
    def write(self, changes: Delta) -> None:
        """Write the new bits of changes into their tensors, and into those tied to them."""

    @abstractmethod
    def write_blocks(self, blocks: Sequence[WholeBlock]) -> None:
        """Decode blocks of an anchor and write the local weights into their tensors, and into those tied to them.

        Raises:
            FormatError: one is broken; StoreError, VerificationError: one cannot be read from disk, or has changed.
        """

    @abstractmethod
    def take_blocks(self, blocks: Sequence[WholeBlock]) -> Sequence[BlockSums]:
        """The same, and return the digests of each."""

    @abstractmethod
    def check_blocks(self, blocks: Sequence[WholeBlock], staged: StagedBlocks | None) -> Sequence[BlockSums]:
        """Decode blocks of an anchor and return the digests of each. Those that differ from the weights are staged.

        Raises:
            FormatError: one is broken; StoreError: the disk is full, or failed.
        """

    def exclusive(self) -> AbstractContextManager[None]:
        """A context in which weights may be written: nothing reads them. In host memory the caller ensures that."""
        return nullcontext()

    def batches(self) -> Iterable[Sequence[Tile]]:
        """The local tiles, in groups that are counted together."""
        return ([tile] for tile in self.layout.tiles if tile.ordinal in self.places)

    @classmethod
    def addresses(cls, source: Any) -> Mapping[str, int]:
        """Where the tensors of a source are, by name."""
        return {name: view.address for name, view in cls.views(source).items()}

    # Attaching

    @classmethod
    def attach(cls, source: Any, layout: Layout, slices: Slices | None = None, widen: bool = False) -> Self:
        """Attach to the tensors of a module, state dict or mapping, in place.

        widen: BF16 tensors of the run may be FP32.

        Raises:
            StateError: names, dtypes or shapes differ from the layout, or a tensor cannot be written in place.
        """
        views = cls.views(source)
        found: MatchedTensors[Flat] = match_tensors(views, layout, slices or {}, widen, cls.widens, cls.span)
        state = cls(layout, found.flats, found.copies, slices, found.places)
        state._addresses = {name: view.address for name, view in views.items()}
        state._marks = SourceMarks.of(source)
        return state

    def is_attached_to(self, source: Any) -> bool:
        """Whether a source still has the memory that was attached: a name can be assigned to another tensor."""
        if self._marks is not None and self._marks.fit(source):
            return True
        if self.addresses(source) != self._addresses:
            return False
        self._marks = SourceMarks.of(source)
        return True

    def spans(self) -> list[tuple[int, int]]:
        """The addresses of all weights, sorted."""
        everything = chain(self.flats.values(), *self.copies.values())
        return sorted((begin, end) for begin, end in map(self.span, everything) if begin < end)

    @cached_property
    def tiles(self) -> Mapping[int, Tile]:
        """The local tiles by ordinal; a tile of which only some groups are local has their numbers."""
        kept = {ordinal: place.tile.kept for ordinal, place in self.places.items() if place.tile is not None}
        return {n: replace(self.layout.tiles[n], kept=kept.get(n)) for n in self.places}

    # Reading

    def snapshot(self) -> "Snapshot":
        """The state as it is now, readable while later versions are committed."""
        with self.lock:
            taken = Snapshot(self)
            self._snapshots.add(taken)
        return taken

    @property
    def digest(self) -> str:
        """The digest as last counted or updated: O(tiles). That of a slice cannot be compared with others."""
        return self._digest(self.sums)

    def _digest(self, sums: Mapping[int, Sum]) -> str:
        if self._digested is None or self._digested[0] is not sums:  # sums are replaced, never changed
            local = (sums[ordinal] for ordinal in self.places)  # the other tiles of a complete state have no weights
            self._digested = sums, digest.state_digest(self.layout.tables, local)
        return self._digested[1]

    def recount(self) -> str:
        """Count the digest from all the weights, keep it, and return it.

        Raises:
            VerificationError: a tied tensor differs from the one it is tied to.
        """
        self.differing_tie = self.find_differing_tie()
        if self.differing_tie:
            raise VerificationError(
                f"a tensor tied to {self.differing_tie!r} has other weights than it: something else has written to one "
                "of them. Do not use the weights; sync again to load all of them from an anchor",
                tensor=self.differing_tie,
            )
        self.sums = self.count()
        return self.digest

    def find_damaged(self) -> list[str]:
        """Recount all the weights; return the names of the tensors that something other than a commit has changed.

        Of a bundle, the names of all its tensors: its digest does not distinguish them. The new digests are kept.
        """
        with self.lock:
            before, self.sums, self.differing_tie = self.sums, self.count(), self.find_differing_tie()
            damaged = [self.layout.tiles[n] for n, total in self.sums.items() if total != before[n]]
        names = {name for tile in damaged for name in tile.names}
        return sorted(names | {self.differing_tie} if self.differing_tie else names)

    def find_damage(self) -> Tile | None:
        """Recount batch by batch, letting commits in between; return a tile whose weights another program changed."""
        for tiles in self.batches():
            with self.lock:
                untied = self._find_differing_tie({name for tile in tiles for name in tile.names})
                counted = self.count_tiles(tiles)
                for tile in tiles:
                    if untied in tile.names or counted[tile.ordinal] != self.sums[tile.ordinal]:
                        return tile
        return None

    def count(self) -> dict[int, Sum]:
        """Count the digests of all local tiles."""
        sums = self._zero_sums()
        for tiles in self.batches():
            sums.update(self.count_tiles(tiles))
        return sums

    def _zero_sums(self) -> dict[int, Sum]:
        """A sum for each tile in the digest: of a complete state, also for tiles without weights."""
        return {tile.ordinal: Sum(0, 0) for tile in self.layout.tiles if self.whole or tile.ordinal in self.places}

    def find_differing_tie(self) -> str | None:
        """The first tensor from which one that is tied to it differs."""
        return self._find_differing_tie(self.copies)

    def _find_differing_tie(self, names: Collection[str]) -> str | None:
        """The first of these tensors from which one that is tied to it differs."""
        for name, others in self.copies.items():
            if name in names and any(not self.equal(self.flats[name], other) for other in others):
                return name
        return None

    # Patches

    def prepare(
        self,
        manifest: Manifest,
        parts: Parts,
        after: Transition[Delta, Memory] | None = None,
    ) -> Transition[Delta, Memory]:
        """Check and decode a patch against this state, or against what it will be after a transition. Changes nothing.

        Returns the transition from the live state to the version, including the changes of `after`.

        Raises:
            BaseMismatchError: it is for another state or history; FormatError: or a subclass, for bad bytes;
            VerificationError: the decoded weights are not those of the record.
        """
        return self.prepare_all([[(manifest, parts)]], after)

    def prepare_all(
        self,
        groups: Iterable[Sequence[tuple[Manifest, Parts]]],
        after: Transition[Delta, Memory] | None = None,
        checking: Callable[[Manifest], AbstractContextManager[object]] = nullcontext,
    ) -> Transition[Delta, Memory]:
        """The same for patches of which each follows the one before it, given in groups that are decoded together.

        All patches of a group are decoded before the first is checked, but they are checked in order: the error is that
        of the first bad patch, and it is raised inside `checking` of its record.
        """
        base = after or self.no_changes()
        changes, sums, history = copy(base.changes), base.sums, base.history
        for group in groups:
            for versions in _by_epoch(group):
                changes, sums, history = self._prepare(versions, changes, sums, history, checking)
        return replace(base, changes=changes, sums=sums, history=history)

    def _prepare(
        self,
        versions: Sequence[tuple[Manifest, Parts]],
        changes: Delta,
        sums: Mapping[int, Sum],
        history: Memory,
        checking: Callable[[Manifest], AbstractContextManager[object]],
    ) -> tuple[Delta, Mapping[int, Sum], Memory]:
        """Prepare consecutive patches of one epoch, or one squashed patch.

        Return changes, sums and history after them.
        """
        first = versions[0][0]
        with checking(first):
            history = self._check_base(first, sums, history)
        opened, promised = [], []
        for manifest, parts in versions:
            with checking(manifest):
                opened.append(bodies := self._open(manifest, parts))
                promised.append(self._digests_in_index(manifest, bodies))
        remembers = first.kind == RecordKind.VERSION
        with checking(first):
            found = self.decode(opened, changes, history if remembers else None)
        for n, (manifest, _) in enumerate(versions):
            with checking(manifest):
                self._check_base_digest(manifest, sums)
                if n == len(found.digest_changes):
                    assert found.fault is not None
                    raise found.fault
                sums = {**sums, **self.check_digest_changes(found.digest_changes[n], promised[n], sums)}
                if self.whole:
                    self._check_digests(manifest, sums, found.history_digests[n])
        return found.changes, sums, found.history if found.history is not None else self.to_backend(History())

    def _check_digests(self, manifest: Manifest, sums: Mapping[int, Sum], history: str | None) -> None:
        if (then := self._digest(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded weights differ from the manifest; weights unchanged",
                version=manifest.version,
                expected=manifest.digest,
                actual=then,
            )
        if history != manifest.history:
            raise VerificationError(
                "digest mismatch: the history of the epoch differs from the manifest; weights unchanged",
                version=manifest.version,
            )

    def _check_base(self, manifest: Manifest, sums: Mapping[int, Sum], history: Memory) -> Memory:
        """Check that a patch applies to this state; return the history that it was encoded with."""
        if manifest.base is None:
            raise BaseMismatchError(
                f"version {manifest.version} is not a patch: it cannot be applied to another version",
                version=manifest.version,
            )
        if manifest.layout != self.layout.id:
            raise BaseMismatchError(
                f"version {manifest.version} has the layout {manifest.layout[:12]}, and the local weights have "
                f"{self.layout.id[:12]}; a full resync from an anchor is required",
                expected=manifest.layout,
                actual=self.layout.id,
            )
        if self.differing_tie:
            raise BaseMismatchError(
                f"a tensor tied to {self.differing_tie!r} has other weights than it; a full resync from an anchor is "
                "required"
            )
        self._check_base_digest(manifest, sums)
        if manifest.kind == RecordKind.SQUASH or manifest.index == 1:
            return self.to_backend(History())
        if manifest.index != history.index + 1:
            raise BaseMismatchError(
                f"version {manifest.version} is patch {manifest.index} of its epoch, and the local weights have "
                f"{history.index} of them; apply patches in order",
                version=manifest.version,
            )
        return history

    def _check_base_digest(self, manifest: Manifest, sums: Mapping[int, Sum]) -> None:
        assert manifest.base is not None
        if self.whole and manifest.base.digest != (actual := self._digest(sums)):
            raise BaseMismatchError(
                f"version {manifest.version} applies to weights with digest {manifest.base.digest[:12]}; the local "
                f"weights have {actual[:12]}: a full resync from an anchor is required",
                expected=manifest.base.digest,
                actual=actual,
            )

    def _open(self, manifest: Manifest, parts: Parts) -> list[Body]:
        bodies = []
        for ref, part in zip(manifest.parts, parts, strict=True):
            if not isinstance(part, Body):
                if ref.data is None and len(part) != ref.size:
                    raise FormatError(f"part {ref.id[:12]} must have {ref.size} bytes; it has {len(part)}", part=ref.id)
                part = Body.of(part, self.layout, ref.id)
            if part.index.header.id != ref.id:
                raise FormatError(
                    f"expected part {ref.id[:12]}, but found part {part.index.header.id[:12]}", part=ref.id
                )
            bodies.append(part)
        return bodies

    def _digests_in_index(self, manifest: Manifest, bodies: Sequence[Body]) -> dict[int, Sum]:
        """The digests of local tiles after a patch, from the indexes of its parts. Each tile is in one part only."""
        promised: dict[int, Sum] = {}
        for body in bodies:
            entries = {entry.tile: entry.sum for entry in body.index.entries if entry.tile in self.places}
            if not promised.keys().isdisjoint(entries):
                raise FormatError(f"two parts of version {manifest.version} change the same tile")
            promised.update(entries)
        return promised

    def check_digest_changes(
        self, moves: Mapping[int, Sum], promised: Mapping[int, Sum], before: Mapping[int, Sum]
    ) -> dict[int, Sum]:
        """Return the digests that changed tiles will have, computed from the changes.

        Raises:
            VerificationError: they differ from the index. Only tiles that are completely local can be checked.
        """
        sums = {ordinal: before[ordinal] + by for ordinal, by in moves.items()}
        for ordinal, total in sums.items():
            if self.places[ordinal].whole and total != promised[ordinal]:
                name = self.layout.tiles[ordinal].tensor.name
                raise VerificationError(
                    f"digest mismatch: the decoded tensor {name!r} differs from the part's index; weights unchanged",
                    tensor=name,
                )
        return sums

    def commit(self, transition: Transition[Delta, Memory]) -> Transition[Delta, Memory]:
        """Write a prepared transition into the weights, or roll everything back if that fails halfway.

        Returns the transition back, which is the undo log: committing it undoes this.

        Raises:
            SupersededError: another state of this process has claimed the memory, and nothing was written.
        """
        back = replace(transition, changes=self.inverse(transition.changes), sums=self.sums, history=self.history)
        with self.lock:
            check_claim(self)
            kept = [(taken, taken.changes) for taken in self._snapshots]
            try:
                with self.exclusive():
                    self.write(transition.changes)
                for taken, changes in kept:
                    taken.changes = self.compose(back.changes, changes)
                self.sums, self.history = transition.sums, transition.history
            except BaseException:
                with self.exclusive():
                    self.write(back.changes)  # also where nothing was written yet: these are the same bits
                for taken, changes in kept:
                    taken.changes = changes
                self.sums, self.history = back.sums, back.history
                raise
        return back

    def join(self, first: Transition[Delta, Memory], then: Transition[Delta, Memory]) -> Transition[Delta, Memory]:
        """Two transitions as one."""
        return replace(then, changes=self.compose(first.changes, then.changes))

    # Anchors

    def check_whole(
        self, manifest: Manifest, parts: Iterable[Body], staged: StagedBlocks | None = None
    ) -> dict[int, Sum]:
        """Decode the parts of an anchor as they arrive, and check and return the digests of its tiles.

        No weight is written; blocks that differ from the weights are staged if `staged` is given.

        Raises:
            FormatError: or a subclass, for bad bytes; VerificationError: the weights are not those of the record;
            StoreError: the disk is full, or failed.
        """
        return self._take_whole(manifest, parts, lambda blocks: self.check_blocks(blocks, staged))

    def load_whole(self, staged: StagedBlocks, sums: Mapping[int, Sum]) -> None:
        """Write an anchor that was checked into the weights, which have not changed since.

        If this fails halfway, `torn` stays True.

        Raises:
            StoreError: the disk failed; VerificationError: it returned other weights than those staged;
            SupersededError: as `commit`.
        """
        with self.lock:
            check_claim(self)
            with self.exclusive():
                self.torn = bool(staged.blocks)
                self.write_blocks(staged.blocks)
            self._begin_at(sums)

    def join_whole(self, manifest: Manifest, parts: Iterable[Body]) -> None:
        """Write the parts of an anchor into the weights as they arrive, and check them in the same pass.

        For weights that are not in use: if this fails halfway, `torn` stays True, and the weights must not be used.

        Raises:
            as `check_whole`.
        """
        with self.lock:
            with self.exclusive():
                self.torn = True
                sums = self._take_whole(manifest, parts, self.take_blocks)
            self._begin_at(sums)

    def rewrite(self, write: Callable[[], None]) -> None:
        """Call a function that writes all weights, and count their digests afterwards.

        If it fails halfway, `torn` stays True.
        """
        with self.lock:
            with self.exclusive():
                self.torn = True
                write()
            self._begin_at(self.count())

    def _begin_at(self, sums: Mapping[int, Sum]) -> None:
        self.sums, self.history, self.differing_tie, self.torn = dict(sums), self.to_backend(History()), None, False

    def _take_whole(
        self, manifest: Manifest, parts: Iterable[Body], take: Callable[[Sequence[WholeBlock]], Sequence[BlockSums]]
    ) -> dict[int, Sum]:
        """Check the parts of an anchor; return the digests of its tiles.

        take: a function that decodes and counts some blocks.
        """
        if manifest.layout != self.layout.id:
            raise BaseMismatchError(
                f"the anchor of version {manifest.version} has the layout {manifest.layout[:12]}, and the local "
                f"weights have {self.layout.id[:12]}",
                expected=manifest.layout,
                actual=self.layout.id,
            )
        sums = self._zero_sums()
        seen: set[int] = set()
        for body in parts:
            promised = {entry.tile: entry.sum for entry in body.index.entries if entry.tile in self.places}
            if any(not self.layout.tiles[entry.tile].size for entry in body.index.entries):
                raise FormatError(f"the anchor of version {manifest.version} lists a tile that has no weights")
            if not seen.isdisjoint(promised):
                raise FormatError(f"two parts of the anchor of version {manifest.version} contain the same tile")
            seen |= promised.keys()
            counted = dict.fromkeys(promised, Sum(0, 0))
            blocks = self._blocks_of(body)
            for block, found in zip(blocks, take(blocks), strict=True):
                counted[block.tile.ordinal] += found.all
                sums[block.tile.ordinal] += found.local
            if counted != promised:
                raise VerificationError(
                    "digest mismatch: a decoded tile of the anchor differs from its index", version=manifest.version
                )
        if seen != self.places.keys():
            raise FormatError(f"the anchor of version {manifest.version} does not contain all tiles")
        if self.whole and (actual := self._digest(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded anchor differs from the manifest",
                expected=manifest.digest,
                actual=actual,
            )
        return sums

    def _blocks_of(self, body: Body) -> list[WholeBlock]:
        return list(patch.anchor_blocks(body.index, body.sections, self.layout, self.places))


AnyState: TypeAlias = LiveState[Any, Any, Any]  # in host memory or on a GPU
AnyTransition: TypeAlias = Transition[Any, Any]


class Snapshot:
    """A state as it was, readable block by block while later versions are committed. Its memory is O(changed since)."""

    def __init__(self, state: AnyState) -> None:
        self.layout, self.sums = state.layout, dict(state.sums)
        self._state = state
        self.changes = state.no_changes().changes  # from the live state back to this one; its commits write them

    @property
    def changed(self) -> int:
        """How many weights have changed since: it keeps as many changes in memory."""
        return replace(self._state.no_changes(), changes=self.changes).changed

    def block(self, tile: Tile, number: int) -> Bits:
        with self._state.lock:
            return self._state.amended_block(tile, number, self.changes)


def _by_epoch(
    versions: Sequence[tuple[Manifest, Parts]],
) -> Iterator[Sequence[tuple[Manifest, Parts]]]:
    """Split consecutive versions where one does not continue the history of the one before it."""
    begin = 0
    for n in range(1, len(versions) + 1):
        if n == len(versions) or not _continues(versions[n - 1][0], versions[n][0]):
            yield versions[begin:n]
            begin = n


def _continues(earlier: Manifest, later: Manifest) -> bool:
    """Whether a record is that of the next patch of an epoch."""
    return (
        earlier.kind == later.kind == RecordKind.VERSION
        and later.base is not None
        and later.layout == earlier.layout
        and later.index == earlier.index + 1
    )
