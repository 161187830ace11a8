"""The counts of `counting` in torch, for tensors on any device: nothing but short rows of numbers leaves it."""

from typing import Any

import numpy as np

from pulsesync.lab.study.measure.counting import CLASSES, DOWN, RATIOS, ROOT_2, UNITS, UP, Numbers


def compare(old: Any, new: Any, last: Any, ends: Any, shift: int) -> Any:
    """Count what differs, and move old to new and last to how each weight went."""
    import torch

    at = (old != new).nonzero().view(-1)
    a, b = _wide(old[at]), _wide(new[at])
    moved = _ordered(b, old.itemsize) - _ordered(a, old.itemsize)
    went_up = moved > 0
    way = torch.where(went_up, UP, DOWN).to(torch.uint8)
    before = last[at]
    old.copy_(new)
    last.zero_()
    last[at] = way
    three = torch.stack([(before != 0).sum(), (before == way).sum(), went_up.sum()])
    most = torch.iinfo(moved.dtype).max
    edges = torch.tensor([min(unit, most) for unit in UNITS], dtype=moved.dtype, device=old.device)
    units = torch.bincount(torch.searchsorted(edges, moved.abs(), right=True) - 1, minlength=len(UNITS))
    by_tensor = _between(torch.searchsorted(at, ends))
    of_class = [_by_class(bits, old.itemsize, shift) for bits in (a, b)]
    return torch.cat([by_tensor, three, units, *of_class])


def _wide(bits: Any) -> Any:
    """Bits as the unsigned numbers they are, in more room."""
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
    """Counts of each from counts up to its end."""
    import torch

    return torch.diff(upto, prepend=upto.new_zeros(1))


def classes(bits: Any, shift: int) -> Any:
    """Weights by exponent bits."""
    return sum(_by_class(_wide(part), bits.itemsize, shift) for part in bits.split(1 << 24))


def differ(old: Any, new: Any, ends: Any) -> Any:
    """Of each tensor, how many weights differ."""
    return _in_each(old != new, ends)


def nonzero(values: Any, ends: Any) -> Any:
    """Of each tensor, how many values are not zero; NaN is none."""
    return _in_each(values != 0, ends)


def _in_each(mask: Any, ends: Any) -> Any:
    import torch

    upto = torch.cat([ends.new_zeros(1), mask.cumsum(0)])
    return _between(upto[ends])


def ratios(old: Any, new: Any, unit: Any) -> Any:
    """Moves by floor(2 log2(|new − old| / unit)) + 254, in FP32; the first and last two are not told apart."""
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
