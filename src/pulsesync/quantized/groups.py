"""From changes of weights to changes of quantised weights and scales: the groups, and the scale of each.

The largest magnitude and the scale of each group are kept. A changed weight can make the largest magnitude of its group
larger, which the weight itself shows. It can make it smaller only if it was the largest; then all weights of the group
are read. If the scale stays the same, bit for bit, only the changed weights are quantised; if not, all of the group.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from pulsesync.quantized.changes import FlatChanges
from pulsesync.quantized.recipes import INTEGERS, Recipe, magnitude_bits
from pulsesync.quantized.targets import Target, Targets

CELLS = 1 << 24  # weights of groups that are read at a time
WHOLE_SHARE = 16  # if more than one weight in 16 is in a group with a new scale, all weights are quantised

Weights = Callable[[int], torch.Tensor]  # of a tensor of the run, by its number: flat, on the device of the groups


@dataclass(frozen=True)
class GroupScales:
    """Largest magnitudes and scales of all groups. It is replaced, never changed."""

    largest: torch.Tensor  # int32 (groups,): the bits of magnitudes
    scales: torch.Tensor  # FP32 (groups,)


@dataclass(frozen=True)
class Requantized:
    """The changes of the tensors of a worker."""

    changes: Sequence[FlatChanges]  # of its tensors by number, sorted; those of each size of a weight together
    known: GroupScales  # afterwards
    rescaled: int  # groups whose scale changes
    requantized: int  # weights that were quantised again


class QuantizedGroups:
    """The groups of all quantised tensors of a worker, on the device `where`; the run has `sources` tensors."""

    def __init__(self, targets: Targets, recipe: Recipe, sources: int, where: torch.device) -> None:
        self.targets, self.recipe, self.where = targets, recipe, where
        self._integer = INTEGERS[targets.dtype.itemsize]
        self._infinity = int(torch.tensor(torch.inf, dtype=targets.dtype).view(self._integer))
        firsts = [target.first_group for target in targets.quantized]
        ends = [target.first_group + math.prod(recipe.scale_shape(target.shape)) for target in targets.quantized]
        self._borders = torch.tensor([firsts, ends], device=where)
        self._group_sizes = [math.prod(recipe.group_shape(target.shape)) for target in targets.quantized]
        self.size = sum(math.prod(target.shape) for target in targets.quantized)
        self._lanes = [_Lane(some, recipe, sources, where) for some in _one_each(targets)]
        by_scales = {target.first_group: target.scales for target in targets.quantized}
        self._first_groups = torch.tensor(sorted(by_scales), device=where)
        self._scale_tensors = torch.tensor([by_scales[first] for first in sorted(by_scales)], device=where)

    # All of them

    def count(self, weights: Weights) -> GroupScales:
        """Compute the largest magnitudes and the scales of all groups."""
        largest = torch.zeros(self.targets.groups, dtype=torch.int32, device=self.where)
        for target in self.targets.quantized:
            matrix = weights(target.source).view(self.targets.dtype).view(target.shape)
            found = magnitude_bits(self.recipe.largest(matrix)).reshape(-1).to(torch.int32)
            part = largest[target.first_group :][: found.numel()]
            torch.maximum(part, found, out=part)
        return GroupScales(largest, self._scales(largest))

    def quantized(self, target: Target, weights: Weights, known: GroupScales) -> torch.Tensor:
        """One tensor, quantised completely."""
        matrix = weights(target.source).view(self.targets.dtype).view(target.shape)
        down, across = self.recipe.scale_shape(target.shape)
        scales = known.scales[target.first_group :][: down * across].view(down, across)
        return self.recipe.encode_matrix(matrix, scales)

    def scales_by_tensor(self, known: GroupScales) -> Mapping[int, torch.Tensor]:
        """The numbers of the tensors of scales, and these."""
        firsts, numbers = self._first_groups.tolist(), self._scale_tensors.tolist()
        ends = [*firsts[1:], self.targets.groups]
        return {number: known.scales[a:b] for number, a, b in zip(numbers, firsts, ends, strict=True)}

    # Some of them

    def follow(self, changes: Sequence[FlatChanges], weights: Weights, known: GroupScales) -> Requantized | None:
        """The changes of the worker's tensors that follow from all changes of weights since these were derived.

        `weights` are those after the changes, `known` the groups before. None: there are too many changes, so that all
        weights must be quantised.
        """
        by_size: dict[int, list[FlatChanges]] = {}
        cells: list[_ChangedCells] = []
        for some in changes:
            for lane in self._lanes:
                if (copied := lane.copied(some)).count:
                    by_size.setdefault(copied.new.element_size(), []).append(copied)
                is_quantized = some.new.element_size() == self.targets.dtype.itemsize
                if is_quantized and (found := lane.cells(some)).count:
                    cells.append(found)
        later, rescaled, count = known, torch.zeros(0, dtype=torch.int64, device=self.where), 0
        if cells:
            changed = _ChangedCells.join(cells) if len(cells) > 1 else cells[0]
            later, rescaled = self._rescale(changed, weights, known)
            if self._weights_in(rescaled) > max(self.size // WHOLE_SHARE, CELLS):
                return None
            kept = changed.outside(rescaled, self.targets.groups)
            by_size.setdefault(1, []).append(self._encode_cells(kept, later.scales))
            count = kept.count
            for target, indices, groups in self._cells_of(rescaled):
                now = self._encode(weights(target.source)[indices], later.scales[groups])
                before = self.targets.tensors[target.name].view(torch.int8)[indices]
                by_size[1].append(FlatChanges(torch.full_like(indices, target.number), indices, before, now))
                count += indices.numel()
            by_size.setdefault(4, []).append(self._scale_changes(rescaled, known, later))
        joined = (FlatChanges.join(some).moving().sorted() for some in by_size.values())
        return Requantized([one for one in joined if one.count], later, rescaled.numel(), count)

    def _rescale(
        self, changed: "_ChangedCells", weights: Weights, known: GroupScales
    ) -> tuple[GroupScales, torch.Tensor]:
        """The groups after changes, and the numbers of those that must be quantised completely."""
        now, before = (magnitude_bits(bits).to(torch.int32) for bits in (changed.new, changed.old))
        at_most = known.largest[changed.groups]
        # Few changed weights are as large as the largest of their group: only these need atomic updates of its maximum.
        large = (now >= at_most).nonzero()[:, 0]
        peak = torch.full_like(known.largest, -1).scatter_reduce_(0, changed.groups[large], now[large], "amax")
        was_largest = torch.zeros_like(known.largest, dtype=torch.bool)
        was_largest[changed.groups[(before == at_most).nonzero()[:, 0]]] = True
        largest = torch.maximum(known.largest, peak)
        unknown = (was_largest & (peak < known.largest)).nonzero()[:, 0]
        if unknown.numel():
            largest[unknown] = 0
            for target, indices, groups in self._cells_of(unknown):
                found = magnitude_bits(weights(target.source)[indices]).to(torch.int32)
                largest.scatter_reduce_(0, groups, found, "amax")
        moved = (largest != known.largest).nonzero()[:, 0]
        scales = known.scales.clone()
        scales[moved] = self._scales(largest[moved])
        differ = scales.view(torch.int32) != known.scales.view(torch.int32)
        if bool((without_number := largest > self._infinity).any()):
            # The result for a group with NaN depends on the engine's formula: it is quantised completely.
            touched = torch.zeros_like(differ)
            touched[changed.groups] = True
            differ |= without_number & touched
        return GroupScales(largest, scales), differ.nonzero()[:, 0]

    def _scales(self, largest: torch.Tensor) -> torch.Tensor:
        return self.recipe.scale(largest.to(self._integer).view(self.targets.dtype))

    def _encode(self, bits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.recipe.encode(bits.view(self.targets.dtype), scales).view(torch.int8)

    def _encode_cells(self, cells: "_ChangedCells", scales: torch.Tensor) -> FlatChanges:
        """Quantise changed weights whose scales stay the same, before and after the change."""
        mine = scales[cells.groups]
        return FlatChanges(cells.owners, cells.indices, self._encode(cells.old, mine), self._encode(cells.new, mine))

    def _scale_changes(self, rescaled: torch.Tensor, known: GroupScales, later: GroupScales) -> FlatChanges:
        tensor = torch.searchsorted(self._first_groups, rescaled, right=True) - 1
        old, new = (one.scales.view(torch.int32)[rescaled] for one in (known, later))
        return FlatChanges(self._scale_tensors[tensor], rescaled - self._first_groups[tensor], old, new)

    def _weights_in(self, groups: torch.Tensor) -> int:
        """An upper bound of the number of weights in some groups, over all tensors."""
        begins, ends = torch.searchsorted(groups, self._borders).tolist()
        return sum((end - begin) * size for begin, end, size in zip(begins, ends, self._group_sizes, strict=True))

    def _cells_of(self, groups: torch.Tensor) -> Iterator[tuple[Target, torch.Tensor, torch.Tensor]]:
        """The weights of some groups, in batches: their tensor, their index in it, and the group of each."""
        if not groups.numel():
            return
        begins, ends = torch.searchsorted(groups, self._borders).tolist()
        for target, begin, end in zip(self.targets.quantized, begins, ends, strict=True):
            if begin < end:
                yield from self._cells_in(target, groups[begin:end])

    def _cells_in(self, target: Target, groups: torch.Tensor) -> Iterator[tuple[Target, torch.Tensor, torch.Tensor]]:
        rows, columns = target.shape
        high, wide = self.recipe.group_shape(target.shape)
        across = self.recipe.scale_shape(target.shape)[1]
        some = max(CELLS // (high * wide), 1)
        low = max(CELLS // wide, 1)  # rows that are read at a time, of a group with more than CELLS weights
        for chosen in groups.split(some):
            local = chosen - target.first_group
            top, left = local // across * high, local % across * wide
            for begin in range(0, high, low):
                row = top[:, None, None] + torch.arange(begin, min(begin + low, high), device=self.where)[:, None]
                column = left[:, None, None] + torch.arange(wide, device=self.where)
                indices = row * columns + column
                owner = chosen[:, None, None].expand(indices.shape).reshape(-1)
                if rows % high or columns % wide:
                    inside = ((row < rows) & (column < columns)).reshape(-1).nonzero()[:, 0]
                    yield target, indices.reshape(-1)[inside], owner[inside]
                else:
                    yield target, indices.reshape(-1), owner


@dataclass(frozen=True)
class _ChangedCells(FlatChanges):
    """Changed weights of quantised tensors, by tensor of the worker."""

    groups: torch.Tensor

    def outside(self, groups: torch.Tensor, count: int) -> "_ChangedCells":
        """The changes that are in none of these groups."""
        if not groups.numel():
            return self
        apart = torch.ones(count, dtype=torch.bool, device=groups.device)
        apart[groups] = False
        return self.where(apart[self.groups])


class _Lane:
    """For each tensor of the run at most one tensor of the worker: tied ones are in several lanes."""

    def __init__(self, targets: Sequence[Target], recipe: Recipe, sources: int, where: torch.device) -> None:
        copied = torch.full((sources,), -1, dtype=torch.int64)
        # for each: number of the target, columns, rows and columns of a group, groups across, first group
        quantized = torch.full((6, sources), -1, dtype=torch.int32)
        for target in targets:
            if target.scales is None:
                copied[target.source] = target.number
                continue
            row = (target.shape[1], *recipe.group_shape(target.shape), recipe.scale_shape(target.shape)[1])
            quantized[:, target.source] = torch.tensor((target.number, *row, target.first_group))
        self._copied, self._quantized = copied.to(where), quantized.to(where)

    def copied(self, changes: FlatChanges) -> FlatChanges:
        """The changes of tensors that are copied, with old and new bits as in `changes`."""
        copied = replace(changes, owners=self._copied[changes.owners])
        return copied.where(copied.owners >= 0)

    def cells(self, changes: FlatChanges) -> _ChangedCells:
        """The changed weights of tensors that are quantised."""
        changes = changes.where(self._quantized[0][changes.owners] >= 0)
        numbers, columns, high, wide, across, first = self._quantized[:, changes.owners]
        row = changes.indices // columns
        column = changes.indices - row * columns
        groups = first + row // high * across + column // wide
        return _ChangedCells(numbers.to(torch.int64), changes.indices, changes.old, changes.new, groups)


def _one_each(targets: Targets) -> list[list[Target]]:
    """The targets, split into lanes such that no tensor of the run has two targets in a lane."""
    lanes: list[dict[int, Target]] = []
    for target in (*targets.copied, *targets.quantized):
        lane = next((lane for lane in lanes if target.source not in lane), None)
        if lane is None:
            lanes.append(lane := {})
        lane[target.source] = target
    return [list(lane.values()) for lane in lanes]
