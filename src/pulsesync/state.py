"""A live state: bit views of the weights, their digest and history. Whoever changes weights does it through here.

Applying a version is a transaction: everything is read, checked and decoded, and the digest it will give is known,
before the first weight changes; should writing then fail, what was written is put back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from pulsesync import digest
from pulsesync.errors import BaseMismatchError, FormatError, StateError, VerificationError
from pulsesync.format import patch
from pulsesync.format.history import History
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest
from pulsesync.model import Bits, Sum, TilePatch
from pulsesync.parallel import spread
from pulsesync.tensors import BitView, view_bits


@dataclass(frozen=True)
class Transition:
    """A version, ready to be committed: what it changes and what the state will then be."""

    patches: tuple[TilePatch, ...]
    sums: Mapping[int, Sum]
    history: History
    digest: str
    whole: bool = False  # an anchor: tied tensors with memory of their own are made equal, whatever they held

    @property
    def changed(self) -> int:
        return sum(patch.changed for patch in self.patches)


class State:
    """The tensors of one process, in the layout of a run.

    Not safe for two threads at a time. Nobody else may write the weights while it is in use; `recount` finds out.
    """

    def __init__(self, layout: Layout, flats: Mapping[str, Bits], copies: Mapping[str, Sequence[Bits]]) -> None:
        self.layout = layout
        self.flats = dict(flats)  # canonical name -> weights
        self.copies = dict(copies)  # canonical name -> tied tensors that have memory of their own
        self.history = History()
        self.sums = self._count()
        self._addresses: dict[str, int] = {}

    @classmethod
    def attach(cls, source: Any, layout: Layout) -> "State":
        """Take hold of a module's, state dict's or mapping's tensors in place.

        Raises:
            StateError: names, dtypes or shapes are not the layout's, or a tensor cannot be written in place.
        """
        everything = _by_name(source)
        specs = {spec.name: spec for spec in layout.tensors}
        wanted = specs | {alias: specs[name] for alias, name in layout.ties.items()}
        for name, spec in wanted.items():
            _fits(name, everything.get(name), spec.dtype, spec.shape, optional=name in layout.ties)
        if extra := sorted(set(everything) - set(wanted)):
            raise StateError(f"the run has no tensor {extra[0]!r} ({len(extra)} such names)", tensor=extra[0])
        flats = {name: everything[name].flat for name in specs}
        copies: dict[str, list[Bits]] = {}
        for alias, name in layout.ties.items():
            known = [flats[name], *copies.get(name, ())]
            if alias in everything and all(everything[alias].address != flat.ctypes.data for flat in known):
                copies.setdefault(name, []).append(everything[alias].flat)
        _check_apart(flats, copies)
        state = cls(layout, flats, copies)
        state._addresses = {name: view.address for name, view in everything.items()}
        return state

    def holds(self, source: Any) -> bool:
        """Whether a source still has the very memory that was attached: tensors can be replaced behind their names."""
        return {name: view.address for name, view in _by_name(source).items()} == self._addresses

    def recount(self) -> str:
        """Count the digest from all the weights, remember it, and return it.

        Raises:
            VerificationError: a tied tensor differs from the one it is tied to.
        """
        if name := self._untied():
            raise VerificationError(f"a tensor tied to {name!r} differs from it", tensor=name)
        self.sums = self._count()
        return self.digest

    def _count(self) -> dict[int, Sum]:
        return {tile.ordinal: digest.count_tile(tile, self.flats[tile.tensor.name]) for tile in self.layout.tiles}

    def _untied(self) -> str | None:
        """The name of a tensor from which one that is tied to it differs."""
        for name, others in self.copies.items():
            if any(not np.array_equal(self.flats[name], other) for other in others):
                return name
        return None

    @property
    def digest(self) -> str:
        """The digest as last counted or moved along: O(tiles)."""
        return digest.state_digest(self.layout.tiles, self.sums)

    def prepare(self, manifest: Manifest, parts: Sequence[bytes]) -> Transition:
        """Check and decode a version against this state, without touching it.

        Raises:
            BaseMismatchError: it is for another state or history; FormatError: and branches, for bad bytes;
            VerificationError: it decodes, but not to the state the manifest promises.
        """
        if manifest.layout != self.layout.id:
            raise BaseMismatchError("the version has another layout", expected=manifest.layout, actual=self.layout.id)
        if manifest.base is not None and (name := self._untied()):
            raise BaseMismatchError(f"a tensor tied to {name!r} differs from it: only an anchor can help", tensor=name)
        if manifest.base is not None and manifest.base.digest != self.digest:
            raise BaseMismatchError(
                f"version {manifest.version} is for another state", expected=manifest.base.digest, actual=self.digest
            )
        history = self.history if manifest.index > 1 else History()
        if manifest.base is not None and manifest.index != history.index + 1:
            raise BaseMismatchError(
                f"patch {manifest.index} of its epoch; {history.index} are known here", version=manifest.version
            )
        for ref, data in zip(manifest.parts, parts, strict=True):
            if len(data) != ref.size:
                raise FormatError(f"part {ref.id[:12]} has {len(data)} bytes, not {ref.size}", part=ref.id)
        patches: list[TilePatch] = []
        promised: dict[int, Sum] = {}
        for ref, data in zip(manifest.parts, parts, strict=True):
            part = patch.decode(data, self.layout, self.flats, expected_id=ref.id, history=history)
            if not promised.keys().isdisjoint(part.sums):
                raise FormatError("two parts of a version change the same tile", version=manifest.version)
            patches += part.patches
            promised.update(part.sums)
        return self._transition(manifest, tuple(patches), promised, history)

    def _transition(
        self, manifest: Manifest, patches: tuple[TilePatch, ...], promised: Mapping[int, Sum], history: History
    ) -> Transition:
        sums = dict(self.sums)
        for one, by in zip(patches, spread(digest.moved, patches), strict=True):
            sums[one.tile.ordinal] += by
            if sums[one.tile.ordinal] != promised[one.tile.ordinal]:
                name = one.tile.tensor.name
                raise VerificationError(f"tensor {name!r} would not be the publisher's", tensor=name)
        after = digest.state_digest(self.layout.tiles, sums)
        if after != manifest.digest:
            raise VerificationError("the state would not be the publisher's", expected=manifest.digest, actual=after)
        later = history.after(patches, self.flats) if manifest.base is not None else History()
        if (later.digest() if later.tiles else None) != manifest.history:
            raise VerificationError("the history would not be the publisher's", version=manifest.version)
        return Transition(patches, sums, later, after, whole=manifest.base is None)

    def commit(self, transition: Transition) -> None:
        """Write a prepared version into the weights; put everything back if that fails half-way."""
        sums, before = dict(transition.sums), (self.sums, self.history)
        kept = [(other, other.copy()) for some in self.copies.values() for other in some] if transition.whole else []
        written: list[tuple[TilePatch, int]] = []
        try:
            for one in transition.patches:
                for number in range(len(one.blocks)):
                    written.append((one, number))
                    self._write(one, number, undo=False)
            for name, others in self.copies.items() if transition.whole else ():
                for other in others:
                    other[:] = self.flats[name]
            self.sums, self.history = sums, transition.history
        except BaseException:
            for one, number in written:
                self._write(one, number, undo=True)
            for other, bits in kept:
                other[:] = bits
            self.sums, self.history = before
            raise

    def _write(self, one: TilePatch, number: int, undo: bool) -> None:
        block, name = one.blocks[number], one.tile.tensor.name
        where, bits = one.flat_indices(block), block.old if undo else block.new
        for flat in (self.flats[name], *self.copies.get(name, ())):
            flat[where] = bits


def _by_name(source: Any) -> dict[str, BitView]:
    """The tensors of a source under all their names, tied ones too."""
    views, ties = view_bits(source)
    return {**views, **{alias: views[name] for alias, name in ties.items()}}


def _check_apart(flats: Mapping[str, Bits], copies: Mapping[str, Sequence[Bits]]) -> None:
    """Refuse tensors that overlap in memory: writing one would change the other."""
    named = [*flats.items(), *((name, other) for name, others in copies.items() for other in others)]
    spans = sorted((flat.ctypes.data, flat.ctypes.data + flat.nbytes, name) for name, flat in named if flat.size)
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise StateError(f"{name!r} and {other!r} share memory here, and in the run they do not", tensor=other)


def _fits(name: str, view: BitView | None, dtype: str, shape: tuple[int, ...], optional: bool) -> None:
    if view is None:
        if optional:
            return
        raise StateError(f"tensor {name!r} of the run is missing here", tensor=name)
    if (view.spec.dtype, view.spec.shape) != (dtype, shape):
        raise StateError(
            f"tensor {name!r} is {view.spec.dtype} {view.spec.shape} here and {dtype} {shape} in the run", tensor=name
        )
    if not view.shared:
        raise StateError(f"tensor {name!r} is not contiguous, or read-only: it cannot be written in place", tensor=name)
