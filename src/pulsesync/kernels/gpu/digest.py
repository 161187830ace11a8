"""Weights written and read one by one, and the digest: of changes, of bytes, and of all weights."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import CHUNK, CHUNK_BITS, FIRST_SEED, SECOND_SEED, load_bits, store_bits


@triton.jit
def _flat(begin, position, start, columns, stride):
    """The index in its tensor of a weight of a tile, by its position in a block; stride 0: the tile lies in a row."""
    p = begin + position.to(tl.int64)
    if stride == 0:
        i = start + p
    else:
        i = start + (p // columns) * stride + p % columns
    return i


@triton.jit
def apply(
    tile_at, block_tile, begins, tile_start, tile_columns, tile_stride, change_starts, positions, values,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write changed weights where they belong in their tensors."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    at, begin = tl.load(tile_at + tile), tl.load(begins + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    first, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    for k in range(first + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = _flat(begin, tl.load(positions + j, mask=some, other=0), start, columns, stride)
        store_bits(at, i, tl.load(values + j, mask=some, other=0), some, ITEM)


@triton.jit
def gather_pieces(
    piece_at, sizes, piece_columns, piece_strides, begins, chunk_piece, first_chunk, run, ITEM: tl.constexpr
):  # fmt: skip
    """Copy pieces of tensors to their places in one run: program c takes one of the chunks of a piece."""
    c = tl.program_id(0).to(tl.int64)
    piece = tl.load(chunk_piece + c)
    at, size, to = tl.load(piece_at + piece), tl.load(sizes + piece), tl.load(begins + piece)
    columns, stride = tl.load(piece_columns + piece), tl.load(piece_strides + piece)
    j = (c - tl.load(first_chunk + piece)) * CHUNK + tl.arange(0, CHUNK)
    bits = load_bits(at, _flat(0, j, 0, columns, stride), j < size, ITEM)
    tl.store(run + to + j, bits, mask=j < size)


@triton.jit(do_not_specialize=["first", "steps"])
def apply_pieces(
    first, block_begins, first_piece, piece_begins, piece_at, piece_columns, piece_strides, change_starts, positions,
    values, steps, ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write changed weights of bundles where they belong in their tensors: the blocks from `first` on.

    The piece that a weight is in is looked for by halves, in so many steps.
    """
    b = tl.program_id(0)
    begin = tl.load(block_begins + b)
    low, high = tl.load(first_piece + b), tl.load(first_piece + b + 1)
    from_, end = tl.load(change_starts + first + b), tl.load(change_starts + first + b + 1)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = begin + tl.load(positions + j, mask=some, other=0).to(tl.int64)
        piece = tl.zeros([SPAN], tl.int64) + low
        stop = tl.zeros([SPAN], tl.int64) + high
        for _ in range(steps):
            middle = (piece + stop) // 2
            after = tl.load(piece_begins + middle, mask=some, other=0) <= i
            piece = tl.where(after, middle, piece)
            stop = tl.where(after, stop, middle)
        inside = i - tl.load(piece_begins + piece, mask=some, other=0)
        columns = tl.load(piece_columns + piece, mask=some, other=1)
        stride = tl.load(piece_strides + piece, mask=some, other=0)
        inside = tl.where(stride == 0, inside, (inside // columns) * stride + inside % columns)
        at = tl.load(piece_at + piece, mask=some, other=0)
        store_bits(at, inside, tl.load(values + j, mask=some, other=0), some, ITEM)


@triton.jit(do_not_specialize=["total"])
def gather(addresses, total: tl.int64, out, ITEM: tl.constexpr, SPAN: tl.constexpr):
    """Read single weights."""
    j = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    at = tl.load(addresses + j, mask=j < total, other=0)
    tl.store(out + j, load_bits(at, 0, j < total, ITEM), mask=j < total)


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _chunk_keys(chunk):
    z = chunk.to(tl.uint64) * 0x9E3779B97F4A7C15
    return _mix(z + FIRST_SEED), _mix(z + SECOND_SEED)


@triton.jit
def digest_change(
    block_tile, begins, tile_start, tile_columns, tile_stride, change_starts, positions, before, after, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How the digest moves by the changes of each block: every 16-bit unit times the key of its place in the tensor."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    begin = tl.load(begins + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    from_, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = _flat(begin, tl.load(positions + j, mask=some, other=0), start, columns, stride) * per
        old = tl.load(before + j, mask=some, other=0).to(tl.uint64)
        new = tl.load(after + j, mask=some, other=0).to(tl.uint64)
        for unit in tl.static_range(per):
            moved = ((new >> (16 * unit)) & 0xFFFF) - ((old >> (16 * unit)) & 0xFFFF)
            left, right = _chunk_keys((i + unit) >> CHUNK_BITS)
            place = (i + unit) & (CHUNK - 1)
            first += moved * tl.load(keys + place, mask=some, other=0).to(tl.uint64) * left
            second += moved * tl.load(keys + CHUNK + place, mask=some, other=0).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * b, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * b + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def digest_bytes(data, starts, begins, block_tile, keys, sums, SPAN: tl.constexpr):
    """The sums of tiles' bytes, block after block: byte begins[b] of its tile is the first of block b."""
    b = tl.program_id(0)
    tile, begin = tl.load(block_tile + b), tl.load(begins + b)
    from_, end = tl.load(starts + b), tl.load(starts + b + 1)
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        i = begin + j - from_
        u = tl.load(data + j, mask=j < end, other=0).to(tl.uint64)
        left, right = _chunk_keys(i >> CHUNK_BITS)
        place = i & (CHUNK - 1)
        first += u * tl.load(keys + place).to(tl.uint64) * left
        second += u * tl.load(keys + CHUNK + place).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def _wide(a, b):
    """The product of words of 32 bits, in 64."""
    return a.to(tl.uint64) * b.to(tl.uint64)


@triton.jit
def _units(at, i, size):
    """Words of four units; those outside are zero."""
    left = size - 4 * i
    x = tl.load(at + i, mask=(i >= 0) & (left > 0), other=0)
    bits = (16 * tl.minimum(tl.maximum(left, 0), 3)).to(tl.uint64)
    return tl.where(left >= 4, x, x & ((tl.full(i.shape, 1, tl.uint64) << bits) - 1))


@triton.jit
def _weighed(x, k0, k1, k2, k3):
    """Of each column the sum of its words' units times their keys."""
    low, high = x.to(tl.uint32), (x >> 32).to(tl.uint32)
    all_ = _wide(low & 0xFFFF, k0) + _wide(low >> 16, k1) + _wide(high & 0xFFFF, k2) + _wide(high >> 16, k3)
    return tl.sum(all_.to(tl.int64), axis=0).to(tl.uint64)


@triton.jit
def recount(block_at, units, starts, block_tile, keys, sums, PER: tl.constexpr):
    """Sum the 16-bit units of blocks times their keys: program (b, q) takes the q-th run of PER (even) chunks of units.

    A block begins at unit starts[b] of its tensor, a multiple of 4.
    """
    b = tl.program_id(0)
    at = tl.load(block_at + b).to(tl.pointer_type(tl.uint64))
    begin, size = tl.load(starts + b), tl.load(units + b)
    word = tl.arange(0, 4)[:, None] * 256 + tl.arange(0, 256)[None, :]  # of a chunk; a thread has a column
    k = keys + 4 * word
    k0, k1, k2, k3 = tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3)
    k += CHUNK
    q0, q1, q2, q3 = tl.load(k), tl.load(k + 1), tl.load(k + 2), tl.load(k + 3)
    first = tl.zeros([256], tl.uint64)
    second = tl.zeros([256], tl.uint64)
    chunk = (begin >> CHUNK_BITS) + tl.program_id(1) * PER
    last = (begin + size - 1) >> CHUNK_BITS
    for _ in range((tl.minimum(PER, last + 1 - chunk) + 1) // 2):
        skipped = chunk * CHUNK - begin
        i = skipped // 4 + word
        # both chunks are under way before either is used
        if (skipped >= 0) & (skipped + 2 * CHUNK <= size):
            x, y = tl.load(at + i), tl.load(at + i + CHUNK // 4)
        else:
            x, y = _units(at, i, size), _units(at, i + CHUNK // 4, size)
        one, two = _chunk_keys(chunk)
        first += _weighed(x, k0, k1, k2, k3) * one
        second += _weighed(x, q0, q1, q2, q3) * two
        one, two = _chunk_keys(chunk + 1)
        first += _weighed(y, k0, k1, k2, k3) * one
        second += _weighed(y, q0, q1, q2, q3) * two
        chunk += 2
    tile = tl.load(block_tile + b)
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def recount_any(
    block_at, sizes, block_tile, begins, tile_start, tile_columns, tile_stride, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The same of any tile: single bytes, columns of a tensor, or beginning between words."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b)
    at, begin, size = tl.load(block_at + b), tl.load(begins + b), tl.load(sizes + b)
    start, columns, stride = tl.load(tile_start + tile), tl.load(tile_columns + tile), tl.load(tile_stride + tile)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        i = _flat(begin, j, start, columns, stride) * per
        x = load_bits(at, j, j < size, ITEM).to(tl.uint64)
        for unit in tl.static_range(per):
            u = (x >> (16 * unit)) & 0xFFFF
            left, right = _chunk_keys((i + unit) >> CHUNK_BITS)
            place = (i + unit) & (CHUNK - 1)
            first += u * tl.load(keys + place).to(tl.uint64) * left
            second += u * tl.load(keys + CHUNK + place).to(tl.uint64) * right
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))
