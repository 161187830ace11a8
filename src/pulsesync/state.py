"""A live state: bit views of the weights, their digest and history. Whoever changes weights does it through here.

Applying a version is a transaction: everything is read, checked and decoded, and the digest it will give is known,
before the first weight changes; should writing then fail, what was written is put back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        self.sums: dict[int, Sum] = {}
        self.recount()

    @classmethod
    def attach(cls, source: Any, layout: Layout) -> "State":
        """Take hold of a module's, state dict's or mapping's tensors in place.

        Raises:
            StateError: names, dtypes or shapes are not the layout's, or a tensor cannot be written in place.
        """
        views, ties = view_bits(source)
        everything = {**views, **{alias: views[name] for alias, name in ties.items()}}
        wanted = {spec.name: spec for spec in layout.tensors} | {
            alias: next(s for s in layout.tensors if s.name == name) for alias, name in layout.ties.items()
        }
        for name, spec in wanted.items():
            _fits(name, everything.get(name), spec.dtype, spec.shape, optional=name in layout.ties)
        if extra := sorted(set(everything) - set(wanted)):
            raise StateError(f"the run has no tensor {extra[0]!r} ({len(extra)} such names)", tensor=extra[0])
        flats = {spec.name: everything[spec.name].flat for spec in layout.tensors}
        copies: dict[str, list[Bits]] = {}
        for alias, name in layout.ties.items():
            if alias in everything and not np.shares_memory(everything[alias].flat, flats[name]):
                copies.setdefault(name, []).append(everything[alias].flat)
        return cls(layout, flats, copies)

    def holds(self, source: Any) -> bool:
        """Whether a source has the very memory this state holds: a module's state dict is a new object every time."""
        views, _ = view_bits(source)
        mine = [*self.flats.values(), *(copy for copies in self.copies.values() for copy in copies)]
        return {v.flat.ctypes.data for v in views.values() if v.shared} == {flat.ctypes.data for flat in mine}

    def recount(self) -> str:
        """Count the digest from all the weights, remember it, and return it.

        Raises:
            VerificationError: a tied tensor differs from the one it is tied to.
        """
        for name, others in self.copies.items():
            if any(not np.array_equal(self.flats[name], other) for other in others):
                raise VerificationError(f"a tensor tied to {name!r} differs from it", tensor=name)
        self.sums = {t.ordinal: digest.count_tile(t, self.flats[t.tensor.name]) for t in self.layout.tiles}
        return self.digest

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
        decoded = [
            patch.decode(data, self.layout, self.flats, expected_id=ref.id, history=history)
            for ref, data in zip(manifest.parts, parts, strict=True)
        ]
        patches = tuple(p for part in decoded for p in part.patches)
        if len({p.tile.ordinal for p in patches}) != len(patches):
            raise FormatError("two parts of a version change the same tile", version=manifest.version)
        return self._transition(manifest, patches, {k: v for part in decoded for k, v in part.sums.items()}, history)

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
        return Transition(patches, sums, later, after)

    def commit(self, transition: Transition) -> None:
        """Write a prepared version into the weights; put everything back if that fails half-way."""
        written: list[tuple[TilePatch, int]] = []
        try:
            for one in transition.patches:
                for number in range(len(one.blocks)):
                    written.append((one, number))
                    self._write(one, number, undo=False)
        except BaseException:
            for one, number in written:
                self._write(one, number, undo=True)
            raise
        self.sums, self.history = dict(transition.sums), transition.history

    def _write(self, one: TilePatch, number: int, undo: bool) -> None:
        block, name = one.blocks[number], one.tile.tensor.name
        where, bits = one.flat_indices(block), block.old if undo else block.new
        for flat in (self.flats[name], *self.copies.get(name, ())):
            flat[where] = bits


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
