"""The counts of `counting` in torch, for tensors on any device: only short rows of numbers are copied to the host."""

from typing import Any

import numpy as np

from pulsesync_lab.study.measure.counting import CLASSES, DOWN, RATIOS, ROOT_2, UNITS, UP, Numbers


def compare(old: Any, new: Any, last: Any, ends: Any, shift: int) -> Any:
    """Count differences, and update old to new and last to the directions."""
    import torch

    at = (old != new).nonzero().view(-1)
    a, b = _wide(old[at]), _wide(new[at])
    moved = _ordered(b, old.itemsize) - _ordered(a, old.itemsize)
    went_up = moved > 0
    direction = torch.where(went_up, UP, DOWN).to(torch.uint8)
    before = last[at]
    old.copy_(new)
    last.zero_()
    last[at] = direction
    three = torch.stack([(before != 0).sum(), (before == direction).sum(), went_up.sum()])
    most = torch.iinfo(moved.dtype).max
    edges = torch.tensor([min(unit, most) for unit in UNITS], dtype=moved.dtype, device=old.device)
    units = torch.bincount(torch.searchsorted(edges, moved.abs(), right=True) - 1, minlength=len(UNITS))
    by_tensor = _between(torch.searchsorted(at, ends))
    of_class = [_by_class(bits, old.itemsize, shift) for bits in (a, b)]
    return torch.cat([by_tensor, three, units, *of_class])


def _wide(bits: Any) -> Any:
    """Bits as unsigned numbers, in a wider dtype."""
    import torch

    return bits.to(torch.int64 if bits.itemsize == 4 else torch.int32) & ((1 << 8 * bits.itemsize) - 1)


def _ordered(wide: Any, itemsize: int) -> Any:
    import torch

    sign = 1 << (8 * itemsize - 1)
    return torch.where(wide >= sign, (2 * sign - 1) ^ wide, wide | sign)


def _by_class(wide: Any, itemsize: int, shift: int) -> Any:
    import torch

    return torch.bincount((wide & ((1 << (8 * itemsize - 1)) - 1)) >> shift, minlength=CLASSES)


def _between(upto: Any) -> Any:
    """The count of each from cumulative counts."""
    import torch

    return torch.diff(upto, prepend=upto.new_zeros(1))


def classes(bits: Any, shift: int) -> Any:
    """Weights by exponent bits."""
    return sum(_by_class(_wide(part), bits.itemsize, shift) for part in bits.split(1 << 24))


def differ(old: Any, new: Any, ends: Any) -> Any:
    """The number of weights that differ, by tensor."""
    return _in_each(old != new, ends)


def nonzero(values: Any, ends: Any) -> Any:
    """The number of values that are not zero, by tensor; NaN does not count."""
    return _in_each(values != 0, ends)


def _in_each(mask: Any, ends: Any) -> Any:
    import torch

    upto = torch.cat([ends.new_zeros(1), mask.cumsum(0)])
    return _between(upto[ends])


def ratios(old: Any, new: Any, unit: Any) -> Any:
    """Moves by floor(2 log2(|new − old| / unit)) + 254, in FP32.

    The first two and the last two are not distinguished.
    """
    import torch

    one = torch.as_tensor(unit, dtype=torch.float32, device=old.device)
    bits = ((new - old) / one).abs().view(torch.int32)
    places = 2 * (bits >> 23).to(torch.int64) + ((bits & 0x7FFFFF) >= ROOT_2)
    return torch.bincount(places & (RATIOS - 1), minlength=RATIOS)


def home(rows: list[Any]) -> list[Numbers]:
    """Counts as arrays on the host, in one transfer."""
    import torch

    flat = torch.cat(rows).cpu().numpy()
    return np.split(flat, np.cumsum([len(row) for row in rows])[:-1]) if rows else []
