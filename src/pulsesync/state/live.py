"""A live state: bit views of the weights, their digest and history. Whoever changes weights does it through here.

Applying versions is a transaction: everything is read, checked and decoded, and the digest it will give is known,
before the first weight changes; should writing then fail, what was written is put back. Several versions can be
prepared one over the other and committed at once. A whole state (an anchor) is checked first where it lies, and then
brought in block by block.
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import BLOCK, Bits, BlockChange, Codec, Sum, TensorSpec, Tile, TilePatch
from pulsesync.errors import BaseMismatchError, FormatError, StateError, VerificationError
from pulsesync.format import patch
from pulsesync.format.body import Body
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, RecordKind
from pulsesync.format.patch import DecodedPart
from pulsesync.format.weights import Changes, Overlay, Weights, compose, inverse
from pulsesync.state.slices import LocalTile, Slices, TileStorage, WidenedTile, windows
from pulsesync.state.views import view_bits, zeros


@dataclass(frozen=True)
class Transition:
    """The way from the live state to another, ready to be committed."""

    changes: Changes
    sums: Mapping[int, Sum]  # then, of all tiles that are held
    history: History  # then

    @property
    def changed(self) -> int:
        return sum(change.positions.size for change in self.changes.values())


class State:
    """The tensors of one process, in the layout of a run.

    One thread at a time changes it; `snapshot` and `recount` may run beside. Nobody else may write the weights while it
    is in use; `recount` finds out.
    """

    stacks = True  # patches can be prepared one over the other, and committed at once
    widens = True  # BF16 tensors of a run can be FP32 tensors here

    def __init__(
        self,
        layout: Layout,
        flats: Mapping[str, Bits],
        copies: Mapping[str, Sequence[Bits]] | None = None,
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
        self.history = History()
        self.torn = False  # whether an anchor is written in part: the weights are between two versions
        self.lock = threading.RLock()
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self._addresses: dict[str, int] = {}
        self._digested: tuple[Mapping[int, Sum], str] | None = None  # the last that was asked for
        self.sums: Mapping[int, Sum] = self.count() if sums is None else sums
        self.untied = self._find_untied()  # a tensor from which one that is tied to it differs: an anchor is required

    @classmethod
    def empty(cls, layout: Layout) -> "State":
        """A state of zeros in memory of its own. Raises: LimitError, if there is no memory for it."""
        return cls(layout, {spec.name: zeros(spec, (spec.size,), spec.kind.bits) for spec in layout.tensors})

    @classmethod
    def attach(cls, source: Any, layout: Layout, slices: Slices | None = None, widen: bool = False) -> "State":
        """Take hold of a module's, state dict's or mapping's tensors in place; widen: FP32 ones for BF16 ones too.

        Raises:
            StateError: names, dtypes or shapes are not the layout's, or a tensor cannot be written in place.
        """
        everything = cls.views(source)
        specs = {name: held.local for name, held in windows(layout.tensors, slices or {}).items()}
        wanted = specs | {alias: specs[name] for alias, name in layout.ties.items() if name in specs}
        dtypes = {name: view.spec.dtype for name, view in everything.items()}
        wide = {name for name, spec in specs.items() if (dtypes.get(name), spec.dtype) == ("F32", "BF16")}
        if not (widen and cls.widens):
            wide = set()
        for name, spec in wanted.items():
            tied_to = layout.ties.get(name)
            advice = _advice(everything.get(name), spec.dtype, tied_to, widen, cls.widens)
            _fits(name, everything.get(name), spec, (tied_to or name) in wide, tied_to is not None, advice)
        if extra := sorted(set(everything) - set(wanted)):
            raise StateError(f"the run has no tensor {extra[0]!r} ({len(extra)} such names)", tensor=extra[0])
        flats = {name: everything[name].flat for name in specs}
        copies: dict[str, list[Bits]] = {}
        for alias, name in layout.ties.items():
            known = [flats[name], *copies.get(name, ())] if name in flats else []
            if alias in everything and all(everything[alias].address != cls.span(flat)[0] for flat in known):
                copies.setdefault(name, []).append(everything[alias].flat)
        check_apart(flats, copies, cls.span)
        places: dict[int, TileStorage] = {
            ordinal: WidenedTile(place) if place.tile.tensor.name in wide else place
            for ordinal, place in find_places(layout, slices or {}).items()
        }
        state = cls(layout, flats, copies, slices, places)
        state._addresses = {name: view.address for name, view in everything.items()}
        return state

    def holds(self, source: Any) -> bool:
        """Whether a source still has the very memory that was attached: tensors can be replaced behind their names."""
        return {name: view.address for name, view in self.views(source).items()} == self._addresses

    @staticmethod
    def views(source: Any) -> Mapping[str, Any]:
        """The tensors of a source under all their names, tied ones too."""
        views, ties = view_bits(source)
        return {**views, **{alias: views[name] for alias, name in ties.items()}}

    @staticmethod
    def span(flat: Any) -> tuple[int, int]:
        """The addresses at which weights begin and end."""
        begin: int = flat.ctypes.data
        return begin, begin + flat.nbytes

    # Reading

    def block(self, tile: Tile, number: int) -> Bits:
        return self.places[tile.ordinal].read(self.flats[tile.tensor.name], number)

    def snapshot(self) -> "Snapshot":
        """The state as it is now, readable while later versions are committed."""
        with self.lock:
            taken = Snapshot(self)
            self._snapshots.add(taken)
        return taken

    @property
    def digest(self) -> str:
        """The digest as last counted or moved along: O(tiles). Of a slice it says nothing to others."""
        return self._digest(self.sums)

    def _digest(self, sums: Mapping[int, Sum]) -> str:
        if self._digested is None or self._digested[0] is not sums:  # sums are replaced, never changed
            held = self.layout.tiles if self.whole else [self.layout.tiles[ordinal] for ordinal in sorted(self.places)]
            self._digested = sums, digest.state_digest(held, sums)
        return self._digested[1]

    def recount(self) -> str:
        """Count the digest from all the weights, remember it, and return it.

        Raises:
            VerificationError: a tied tensor differs from the one it is tied to.
        """
        self.untied = self._find_untied()
        if self.untied:
            raise VerificationError(f"a tensor tied to {self.untied!r} differs from it", tensor=self.untied)
        self.sums = self.count()
        return self.digest

    def find_damaged(self) -> list[str]:
        """Recount all the weights; return the names of the tensors that something other than a commit has changed."""
        with self.lock:
            counted, untied = self.count(), self._find_untied()
            differ = {self.layout.tiles[n].tensor.name for n, total in counted.items() if total != self.sums[n]}
        return sorted(differ | {untied} if untied else differ)

    def find_damage(self) -> Tile | None:
        """Recount tile by tile, letting commits in between; return one whose weights another program changed."""
        for tile in self.layout.tiles:
            if tile.ordinal in self.places:
                with self.lock:
                    flat, *others = self._memory(tile)
                    untied = any(not np.array_equal(flat, other) for other in others)
                    if untied or self._count_tile(tile) != self.sums[tile.ordinal]:
                        return tile
        return None

    def count(self) -> dict[int, Sum]:
        """Count the digests of all tiles that are local; of one that is local in part, as if the rest were zeros."""
        return {tile.ordinal: self._count_tile(tile) for tile in self.layout.tiles if self._counts(tile)}

    def _counts(self, tile: Tile) -> bool:
        return self.whole or tile.ordinal in self.places

    def _count_tile(self, tile: Tile) -> Sum:
        place = self.places.get(tile.ordinal)
        if place is None:
            return Sum(0, 0)
        if place.tile == tile:
            return digest.count_tile(tile, self.flats[tile.tensor.name])
        total = digest.sum_up(
            spread(lambda n: digest.count_block(tile, n, self.block(tile, n)), range(tile.block_count))
        )
        return total if self._exact(tile, place) else total + Sum(1, 1)  # which is then no published state's

    def _exact(self, tile: Tile, place: TileStorage) -> bool:
        """Whether all weights of a tile are numbers that the dtype of the run has."""
        if not isinstance(place, WidenedTile):
            return True
        flat = self.flats[tile.tensor.name]
        return all(spread(lambda n: place.exact(flat, n), range(tile.block_count)))

    def _find_untied(self) -> str | None:
        for name, others in self.copies.items():
            if any(not np.array_equal(self.flats[name], other) for other in others):
                return name
        return None

    # Patches

    def prepare(
        self, manifest: Manifest, parts: "Sequence[bytes | memoryview | Body]", after: Transition | None = None
    ) -> Transition:
        """Check and decode a patch against this state, or against what it will be after a transition. Touches nothing.

        Returns the way from the live state to the version, whatever `after` has on it already.

        Raises:
            BaseMismatchError: it is for another state or history; FormatError: and branches, for bad bytes;
            VerificationError: it decodes, but not to the state the record promises.
        """
        base = after or Transition({}, self.sums, self.history)
        history = self._check_base(manifest, base)
        bodies = self._open(manifest, parts)
        weights: Weights = Overlay(self, base.changes) if base.changes else self
        patches: list[TilePatch] = []
        promised: dict[int, Sum] = {}
        for body in bodies:
            part = self.decode(body, weights, history if manifest.kind == RecordKind.VERSION else None)
            if not promised.keys().isdisjoint(part.sums):
                raise FormatError(f"two parts of version {manifest.version} change the same tile")
            patches += part.patches
            promised.update(part.sums)
        sums = {**base.sums, **self.move(patches, promised, base.sums)}
        if self.whole and (then := self._digest(sums)) != manifest.digest:
            raise VerificationError(
                "digest mismatch: the decoded weights differ from the manifest; weights unchanged",
                version=manifest.version,
                expected=manifest.digest,
                actual=then,
            )
        later = history.after(patches, weights) if manifest.kind == RecordKind.VERSION else History()
        if self.whole and (later.digest() if later.tiles else None) != manifest.history:
            raise VerificationError(
                "digest mismatch: the history of the epoch differs from the manifest; weights unchanged",
                version=manifest.version,
            )
        return Transition(_composed(base.changes, patches), sums, later)

    def decode(self, body: Body, weights: Weights | None = None, history: History | None = None) -> DecodedPart:
        """Decode a part, as far as its tiles are held, against this state or other weights in its place.

        Raises:
            FormatError: and branches, for bad bytes; StateError: what is held cuts through a tile.
        """
        self._check_codecs(body)
        wanted = None if self.whole else self.places.keys()
        part = patch.decode_tiles(
            body.index, body.sections, self.layout, weights or self, wanted=wanted, history=history
        )
        return DecodedPart(tuple(self._kept(part.patches)), part.sums)

    def _check_base(self, manifest: Manifest, base: Transition) -> History:
        """Check that a patch is for this state; return the history it was made with."""
        if manifest.base is None:
            raise BaseMismatchError(f"version {manifest.version} is not a patch", version=manifest.version)
        if manifest.layout != self.layout.id:
            raise BaseMismatchError("the version has another layout", expected=manifest.layout, actual=self.layout.id)
        if self.untied:
            raise BaseMismatchError(
                f"a tensor tied to {self.untied!r} differs from it; a full resync from an anchor is required"
            )
        if self.whole and manifest.base.digest != (held := self._digest(base.sums)):
            raise BaseMismatchError(
                f"version {manifest.version} is for another state", expected=manifest.base.digest, actual=held
            )
        if manifest.kind == RecordKind.SQUASH or manifest.index == 1:
            return History()
        if manifest.index != base.history.index + 1:
            raise BaseMismatchError(
                f"patch {manifest.index} of its epoch; {base.history.index} are known here", version=manifest.version
            )
        return base.history

    def _open(self, manifest: Manifest, parts: "Sequence[bytes | memoryview | Body]") -> list[Body]:
        bodies = []
        for ref, part in zip(manifest.parts, parts, strict=True):
            if not isinstance(part, Body):
                if len(part) != ref.size:
                    raise FormatError(f"part {ref.id[:12]} has {len(part)} bytes, not {ref.size}", part=ref.id)
                part = Body.of(part, self.layout, ref.id)
            if part.index.header.id != ref.id:
                raise FormatError(f"part {part.index.header.id[:12]} is not {ref.id[:12]}", part=ref.id)
            bodies.append(part)
        return bodies

    def _check_codecs(self, body: Body) -> None:
        """What is held in part can take only what needs no old weights."""
        for entry in body.index.entries if not self.whole else ():
            place = self.places.get(entry.tile)
            if place and place.tile and not place.whole and entry.codec not in (Codec.GAP, Codec.DENSE):
                name = place.tile.tensor.name
                raise StateError(
                    f"the slice of {name!r} that is held cuts through a tile of the run: publish with a grid that has "
                    "borders there, or with codec='gap'",
                    tensor=name,
                )

    def _kept(self, patches: Iterable[TilePatch]) -> Iterable[TilePatch]:
        for one in patches:
            place = self.places[one.tile.ordinal]
            kept = one.blocks if place.whole else tuple(b for block in one.blocks if (b := place.keep(block)))
            yield TilePatch(one.tile, one.codec, kept, one.cut)

    def move(
        self, patches: Sequence[TilePatch], promised: Mapping[int, Sum], before: Mapping[int, Sum]
    ) -> dict[int, Sum]:
        """Return the digests that changed tiles will have, as they follow from what changes.

        Raises:
            VerificationError: they are not as promised, which is known of tiles that are local as a whole.
        """
        sums = {}
        for one, by in zip(patches, spread(digest.moved, patches), strict=True):
            ordinal = one.tile.ordinal
            sums[ordinal] = before[ordinal] + by
            if self.places[ordinal].whole and sums[ordinal] != promised[ordinal]:
                name = one.tile.tensor.name
                raise VerificationError(
                    f"digest mismatch: the decoded tensor {name!r} differs from the part's index; weights unchanged",
                    tensor=name,
                )
        return sums

    def commit(self, transition: Transition) -> Transition:
        """Write a prepared transition into the weights, or put everything back if that fails half-way.

        Returns the way back: committing that undoes this.
        """
        back = Transition({key: inverse(c) for key, c in transition.changes.items()}, self.sums, self.history)
        with self.lock:
            written: list[tuple[int, int]] = []
            kept = [(taken, taken.changes) for taken in self._snapshots]
            try:
                for key, change in transition.changes.items():
                    written.append(key)
                    self._write(key[0], change)
                for taken, changes in kept:
                    taken.changes = _compose_all(back.changes, changes)
                self.sums, self.history = transition.sums, transition.history
            except BaseException:
                for key in written:
                    self._write(key[0], back.changes[key])
                for taken, changes in kept:
                    taken.changes = changes
                self.sums, self.history = back.sums, back.history
                raise
        return back

    def join(self, first: Transition, then: Transition) -> Transition:
        """Two transitions as one."""
        return Transition(_compose_all(first.changes, then.changes), then.sums, then.history)

    def _write(self, ordinal: int, change: BlockChange) -> None:
        for flat in self._memory(self.layout.tiles[ordinal]):
            self.places[ordinal].write(flat, change)

    def _memory(self, tile: Tile) -> tuple[Bits, ...]:
        """Everywhere that a tensor is held."""
        return (self.flats[tile.tensor.name], *self.copies.get(tile.tensor.name, ()))

    # Anchors

    def check_whole(self, manifest: Manifest, parts: Sequence[Body]) -> dict[int, Sum]:
        """Decode an anchor where it lies, block by block, and return the digests of its tiles, which agree.

        Raises:
            FormatError: and branches, for bad bytes; VerificationError: it is not the state the record promises.
        """
        if manifest.layout != self.layout.id:
            raise BaseMismatchError("the anchor has another layout", expected=manifest.layout, actual=self.layout.id)
        sums = {tile.ordinal: Sum(0, 0) for tile in self.layout.tiles if self._counts(tile)}
        seen: set[int] = set()
        for body in parts:
            promised = {entry.tile: entry.sum for entry in body.index.entries if entry.tile in self.places}
            if any(not self.layout.tiles[entry.tile].size for entry in body.index.entries):
                raise FormatError(f"the anchor of version {manifest.version} names a tile that has no weights")
            if not seen.isdisjoint(promised):
                raise FormatError(f"two parts of the anchor of version {manifest.version} hold the same tile")
            seen |= promised.keys()
            counted = dict.fromkeys(promised, Sum(0, 0))
            for tile, number, bits in patch.dense_blocks(body.index, body.sections, self.layout, self.places):
                counted[tile.ordinal] += self._count_block(tile, number, bits)
                if not self.places[tile.ordinal].whole:
                    sums[tile.ordinal] += self._count_local(tile, number, bits)
            if counted != promised:
                raise VerificationError("a tile of the anchor is not the publisher's", version=manifest.version)
            sums.update((ordinal, total) for ordinal, total in promised.items() if self.places[ordinal].whole)
        if seen != self.places.keys():
            raise FormatError(f"the anchor of version {manifest.version} lacks a tile")
        if self.whole and (actual := self._digest(sums)) != manifest.digest:
            raise VerificationError("the anchor is not its version", expected=manifest.digest, actual=actual)
        return sums

    def load_whole(self, parts: Sequence[Body], sums: Mapping[int, Sum]) -> None:
        """Bring an anchor that was checked into the weights. If this fails halfway, `torn` stays True."""
        with self.lock:
            for body in parts:
                for tile, number, bits in patch.dense_blocks(body.index, body.sections, self.layout, self.places):
                    self.torn = True
                    self._write_block(tile, number, bits)
            self.sums, self.history, self.untied, self.torn = dict(sums), History(), None, False

    def _count_block(self, tile: Tile, number: int, bits: Bits) -> Sum:
        return digest.count_block(tile, number, bits)

    def _count_local(self, tile: Tile, number: int, bits: Bits) -> Sum:
        """Count the digest of what is local of a block."""
        everything = BlockChange(number, np.arange(bits.size, dtype=np.uint32), np.zeros_like(bits), bits)
        kept = self.places[tile.ordinal].keep(everything)
        return digest.moved(TilePatch(tile, Codec.DENSE, (kept,))) if kept else Sum(0, 0)

    def _write_block(self, tile: Tile, number: int, bits: Bits) -> None:
        for flat in self._memory(tile):
            self.places[tile.ordinal].write_block(flat, number, bits)

    def load_tiles(self, tiles: Mapping[int, Bits], sums: Mapping[int, Sum]) -> None:
        """Bring whole tiles that were checked into the weights. If this fails they are neither here nor there."""
        with self.lock:
            for ordinal, bits in tiles.items():
                tile = self.layout.tiles[ordinal]
                for number in range(tile.block_count):
                    self._write_block(tile, number, bits[number * BLOCK : (number + 1) * BLOCK])
            self.sums, self.history = {**self.sums, **sums}, History()

    def adopt(self, tiles: Mapping[int, Bits], sums: Mapping[int, Sum]) -> None:
        """Take arrays over as the memory of tiles that are a whole tensor each: for a state in memory of its own."""
        with self.lock:
            for ordinal, bits in tiles.items():
                self.flats[self.layout.tiles[ordinal].tensor.name] = bits
            self.sums, self.history = {**self.sums, **sums}, History()


class Snapshot:
    """A state as it was, readable block by block while the live one moves on. O(changed since) of memory."""

    def __init__(self, state: State) -> None:
        self.layout, self.sums = state.layout, dict(state.sums)
        self._state = state
        self.changes: Changes = {}  # from the live state back to this one; written by its commits, under its lock

    def block(self, tile: Tile, number: int) -> Bits:
        with self._state.lock:
            bits = self._state.block(tile, number).copy()
            change = self.changes.get((tile.ordinal, number))
        if change is not None:
            bits[change.positions] = change.new
        return bits


def _compose_all(first: Changes, then: Changes) -> dict[tuple[int, int], BlockChange]:
    out: dict[tuple[int, int], BlockChange] = {}
    for key in first.keys() | then.keys():
        if both := compose(first.get(key), then.get(key)):
            out[key] = both
    return out


def _composed(changes: Changes, patches: Iterable[TilePatch]) -> dict[tuple[int, int], BlockChange]:
    later = {(one.tile.ordinal, block.number): block for one in patches for block in one.blocks}
    return _compose_all(changes, later) if changes else later


def find_places(layout: Layout, slices: Slices) -> dict[int, LocalTile]:
    """Where the tiles of a run lie in what is held of its tensors, by ordinal."""
    if not slices:
        return {tile.ordinal: LocalTile(tile, True) for tile in layout.tiles if tile.size}
    held = windows(layout.tensors, slices)
    found = {tile.ordinal: held[tile.tensor.name].place(tile) for tile in layout.tiles if tile.tensor.name in held}
    return {ordinal: place for ordinal, place in found.items() if place}


def check_apart(
    flats: Mapping[str, Any],
    copies: Mapping[str, Sequence[Any]] | None = None,
    span: Callable[[Any], tuple[int, int]] = State.span,
) -> None:
    """Refuse tensors that overlap in memory: writing one would change the other. Raises: StateError."""
    copies = copies or {}
    named = [*flats.items(), *((name, other) for name, others in copies.items() for other in others)]
    spans = sorted((*span(flat), name) for name, flat in named if len(flat))
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise StateError(f"{name!r} and {other!r} share memory here, and in the run they do not", tensor=other)


def _fits(name: str, view: Any | None, spec: TensorSpec, wide: bool, optional: bool, advice: str) -> None:
    """Check that a local tensor can take a tensor of the run; wide: as FP32 for BF16. Raises: StateError."""
    if view is None:
        if optional:
            return
        raise StateError(f"tensor {name!r} of the run is missing here", tensor=name)
    if (view.spec.dtype, view.spec.shape) != ("F32" if wide else spec.dtype, spec.shape):
        raise StateError(
            f"tensor {name!r} is {view.spec.dtype} {view.spec.shape} here and {spec.dtype} {spec.shape} in the run"
            f"{advice}",
            tensor=name,
        )
    if not view.shared:
        raise StateError(f"tensor {name!r} is not contiguous, or read-only: it cannot be written in place", tensor=name)


def _advice(view: Any | None, dtype: str, tied_to: str | None, widen: bool, widens: bool) -> str:
    """What to do about a tensor whose dtype is another than the run's, or than that of the tensor it is tied to."""
    here = view.spec.dtype if view is not None else dtype
    if (here, dtype) == ("F32", "BF16") and not widen:
        return "; pass widen=True to Subscriber to have each BF16 value written as the FP32 number that it is"
    if (here, dtype) == ("F32", "BF16") and not widens:
        return "; tensors on a GPU cannot be widened: give the model BF16 weights, or widen a copy in host memory"
    if widen and dtype == "BF16" and tied_to:
        return f"; {tied_to!r}, to which it is tied, has another dtype here: give both the same"
    return "; widen=True is for tensors that are BF16 in the run" if widen and here == "F32" != dtype else ""
