"""Tables of changes, as ranks of a group send them: for each tile the positions of its changes, then the new values."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import load_bits, store_bits

IN_BLOCK = tl.constexpr((1 << 20) - 1)  # the bits of a position in a tile that are the position in its block


@triton.jit
def write_table(
    place_at, value_at, begins, change_starts, positions, values, ITEM: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Write the changes of each block to the addresses of its positions and values in a table."""
    b = tl.program_id(0)
    places, bits, begin = tl.load(place_at + b), tl.load(value_at + b), tl.load(begins + b)
    first, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    for k in range(first + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        position = tl.load(positions + j, mask=some, other=0).to(tl.int64)
        store_bits(places, j - first, (begin + position).to(tl.uint32), some, 4)
        store_bits(bits, j - first, tl.load(values + j, mask=some, other=0), some, ITEM)


@triton.jit
def table_starts(block_tile, begins, place_at, counts, firsts, starts):
    """Write where the changes of each block begin, by binary search among the positions of its tile."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    begin, places = tl.load(begins + b), tl.load(place_at + tile).to(tl.pointer_type(tl.uint32))
    low = tl.zeros([], tl.int64)
    high = tl.load(counts + tile)
    while low < high:
        middle = (low + high) // 2
        before = tl.load(places + middle).to(tl.int64) < begin
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    tl.store(starts + b, tl.load(firsts + tile) + low)


@triton.jit
def read_table(
    sizes, place_at, value_at, counts, firsts, positions, values, faults, ITEM: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """Read the changes of each tile: positions in their blocks, and values.

    Counts in `faults` positions that are outside their tile or not in order.
    """
    t = tl.program_id(0)
    size, first, count = tl.load(sizes + t), tl.load(firsts + t), tl.load(counts + t)
    places, bits = tl.load(place_at + t), tl.load(value_at + t)
    for k in range(tl.program_id(1) * SPAN, count, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < count
        place = load_bits(places, j, some, 4).to(tl.int64)
        before = load_bits(places, j - 1, some & (j > 0), 4).to(tl.int64)
        good = (place < size) & ((j == 0) | (place > before))
        wrong = tl.sum((some & (good == 0)).to(tl.int32))
        if wrong > 0:
            tl.atomic_add(faults, wrong)
        tl.store(positions + first + j, (place & IN_BLOCK).to(tl.uint32), mask=some)
        tl.store(values + first + j, load_bits(bits, j, some, ITEM), mask=some)
