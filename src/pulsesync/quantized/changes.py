"""Changes of weights as flat tensors, in host memory or on a GPU: which tensors, which indices, which bits.

A `StateBackend` keeps changes by tile and block. `host_changes` and `device_changes` turn those of theirs into
flat tensors and back, with the same two functions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch

from pulsesync.format.layout import Layout

SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits, by the size of a weight


@dataclass(frozen=True)
class FlatChanges:
    """Some changes of tensors of one dtype."""

    owners: torch.Tensor  # int64: for each change the number of its tile, or of its tensor
    indices: torch.Tensor  # int64: its index there
    old: torch.Tensor  # integers of the size of the dtype
    new: torch.Tensor

    @classmethod
    def join(cls, some: Sequence[Self]) -> Self:
        """Changes of tensors of one dtype, one after the other, in new memory."""
        return cls(*(torch.cat(column) for column in zip(*(one.columns for one in some), strict=True)))

    @property
    def columns(self) -> list[torch.Tensor]:
        return [getattr(self, one.name) for one in fields(self)]

    def to(self, where: torch.device) -> Self:
        return type(self)(*(column.to(where) for column in self.columns))

    def where(self, mask: torch.Tensor) -> Self:
        """The changes for which a mask is True."""
        chosen = mask.nonzero()[:, 0]  # once for all columns
        return self if chosen.numel() == self.count else self.take(chosen)

    def moving(self) -> Self:
        """The changes whose old and new bits differ."""
        return self.where(self.old != self.new)

    def take(self, chosen: torch.Tensor) -> Self:
        """The changes with these numbers, in their order."""
        return type(self)(*(column[chosen] for column in self.columns))

    def inverse(self) -> Self:
        return replace(self, old=self.new, new=self.old)

    def sorted(self) -> Self:
        """Sorted by owners, and by indices in each."""
        keys = (self.owners << 43) | self.indices  # a layout has at most 2^20 tensors
        if bool((keys[1:] > keys[:-1]).all()):
            return self
        return self.take(torch.argsort(keys))

    @property
    def count(self) -> int:
        return self.owners.numel()


class TileIndex:
    """Where the weights of the tiles of a layout are in its tensors."""

    def __init__(self, layout: Layout, where: torch.device) -> None:
        numbers = {spec.name: n for n, spec in enumerate(layout.tensors)}
        tables = [tile.piece_table[:, :4] for tile in layout.tiles]
        starts = np.cumsum([0, *(tile.size for tile in layout.tiles)])
        table = np.concatenate([np.array((at, 0, 0, 0)) + rows for rows, at in zip(tables, starts[:-1], strict=True)])
        owners = [numbers[piece.tensor.name] for tile in layout.tiles for piece in tile.pieces or (tile,)]
        firsts = np.cumsum([0, *(len(rows) for rows in tables)])
        self._starts, self._pieces = (torch.from_numpy(some).to(where) for some in (starts, firsts))
        self._begins, self._firsts, self._columns, self._strides = torch.from_numpy(table.T.copy()).to(where)
        self._owners = torch.tensor(owners, device=where)
        self._bundles = any(tile.pieces for tile in layout.tiles)
        self._cut = bool((table[:, 3] > 0).any())

    def by_tensor(self, changes: FlatChanges) -> FlatChanges:
        """Changes of tiles as changes of their tensors."""
        piece, inside = self._pieces[changes.owners], changes.indices
        if self._bundles:
            many = (self._pieces[changes.owners + 1] - piece > 1).nonzero()[:, 0]
            at = self._starts[changes.owners[many]] + inside[many]
            piece[many] = torch.searchsorted(self._begins, at, right=True) - 1
            inside = inside.index_put((many,), at - self._begins[piece[many]])
        indices = self._firsts[piece] + inside
        if self._cut:
            columns, strides = self._columns[piece], self._strides[piece]
            in_rows = torch.div(inside, columns, rounding_mode="floor") * (strides - columns)
            indices += torch.where(strides > 0, in_rows, 0)
        return FlatChanges(self._owners[piece], indices, changes.old, changes.new)
