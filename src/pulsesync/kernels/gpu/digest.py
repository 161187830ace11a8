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


@triton.jit
def _find_piece(begins, first, count, i, STRIDE: tl.constexpr):
    """The piece that weight i is in, of `count` from the one numbered first on, looked for by halves.

    begins: where each begins, STRIDE numbers from one to the next.
    """
    piece = tl.zeros_like(i) + first
    while count > 1:
        half = count // 2
        piece = tl.where(tl.load(begins + (piece + half) * STRIDE) <= i, piece + half, piece)
        count -= half
    return piece


@triton.jit(do_not_specialize=["first"])
def apply_pieces(
    first, block_begins, first_piece, piece_begins, piece_at, piece_columns, piece_strides, change_starts, positions,
    values, ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write changed weights of bundles where they belong in their tensors: the blocks from `first` on."""
    b = tl.program_id(0)
    begin = tl.load(block_begins + b)
    low, high = tl.load(first_piece + b), tl.load(first_piece + b + 1)
    from_, end = tl.load(change_starts + first + b), tl.load(change_starts + first + b + 1)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = begin + tl.load(positions + j, mask=some, other=0).to(tl.int64)
        piece = _find_piece(piece_begins, low, high - low, i, 1)
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
    begins, block_pieces, pieces, change_starts, positions, before, after, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How the digest moves by the changes of each block: every 16-bit unit times the key of its index in its tensor.

    pieces: rows of `Tile.piece_table`. block_pieces: of each block its first row, how many it has, and whether a piece
    of it does not lie in a row.
    """
    b = tl.program_id(0)
    begin = tl.load(begins + b)
    first_piece, count, apart = (
        tl.load(block_pieces + 3 * b), tl.load(block_pieces + 3 * b + 1), tl.load(block_pieces + 3 * b + 2),
    )  # fmt: skip
    from_, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        p = begin + tl.load(positions + j, mask=some, other=0).to(tl.int64)
        row = pieces + 5 * _find_piece(pieces, first_piece, count, p, 5)
        i = p - tl.load(row)
        if apart != 0:
            columns, stride = tl.load(row + 2), tl.load(row + 3)
            i = tl.where(stride == 0, i, (i // columns) * stride + i % columns)
        i = (tl.load(row + 1) + i) * per
        offset = tl.load(row + 4)
        old = tl.load(before + j, mask=some, other=0).to(tl.uint64)
        new = tl.load(after + j, mask=some, other=0).to(tl.uint64)
        for unit in tl.static_range(per):
            moved = ((new >> (16 * unit)) & 0xFFFF) - ((old >> (16 * unit)) & 0xFFFF)
            left, right = _chunk_keys(offset + ((i + unit) >> CHUNK_BITS))
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
def recount(run_at, rows, keys, sums, PER: tl.constexpr):
    """Sum the 16-bit units of runs of weights times their keys: program (r, q) takes the q-th PER (even) chunks.

    rows: of each run its tile, units, the index of the first in its tensor, a multiple of 4, and the tensor's offset.
    """
    r = tl.program_id(0)
    at = tl.load(run_at + r).to(tl.pointer_type(tl.uint64))
    row = rows + 4 * r
    size, begin, offset = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
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
        one, two = _chunk_keys(offset + chunk)
        first += _weighed(x, k0, k1, k2, k3) * one
        second += _weighed(x, q0, q1, q2, q3) * two
        one, two = _chunk_keys(offset + chunk + 1)
        first += _weighed(y, k0, k1, k2, k3) * one
        second += _weighed(y, q0, q1, q2, q3) * two
        chunk += 2
    tile = tl.load(row)
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def recount_any(run_at, rows, keys, sums, ITEM: tl.constexpr, SPAN: tl.constexpr):
    """The same of any run: of single bytes, of columns of a tensor, or beginning between words.

    rows: of each run its tile and weights, how many weights of its piece are before it, the index in its tensor of the
    first weight of the piece, the piece's columns, weights from row to row (0: it lies in a row), and the offset.
    """
    r = tl.program_id(0)
    at, row = tl.load(run_at + r), rows + 7 * r
    size, begin, start = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    columns, stride, offset = tl.load(row + 4), tl.load(row + 5), tl.load(row + 6)
    per: tl.constexpr = (ITEM + 1) // 2
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(tl.program_id(1) * SPAN, size, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        i = _flat(begin, j, start, columns, stride) * per
        x = load_bits(at, j, j < size, ITEM).to(tl.uint64)
        for unit in tl.static_range(per):
            u = (x >> (16 * unit)) & 0xFFFF
            left, right = _chunk_keys(offset + ((i + unit) >> CHUNK_BITS))
            place = (i + unit) & (CHUNK - 1)
            first += u * tl.load(keys + place).to(tl.uint64) * left
            second += u * tl.load(keys + CHUNK + place).to(tl.uint64) * right
    tile = tl.load(row)
    tl.atomic_add(sums + 2 * tile, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * tile + 1, tl.sum(second.to(tl.int64)))
