"""Weights written and read one by one, and the digest: of changes, of bytes, and of all weights."""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import (
    CHUNK,
    CHUNK_BITS,
    FIRST_SEED,
    INTERPRETED,
    SECOND_SEED,
    find_last,
    load_bits,
    store_bits,
)

UNROLL = tl.constexpr(8)  # pieces of chunks that are loaded together


@triton.jit
def _flat(begin, position, start, columns, stride):
    """The index in its tensor of a weight of a tile, by its position in a block; stride 0: the tile is contiguous."""
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
    """Write changed weights into their tensors."""
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
def _copy_words(source, target, ITEM: tl.constexpr):
    """Copy a contiguous chunk from one address to another, both multiples of 8."""
    i = tl.arange(0, CHUNK * ITEM // 8)
    words = tl.load(source.to(tl.pointer_type(tl.uint64)) + i)
    tl.store(target.to(tl.pointer_type(tl.uint64)) + i, words)


@triton.jit
def gather_pieces(
    piece_at, sizes, piece_columns, piece_strides, begins, chunk_piece, first_chunk, run, ITEM: tl.constexpr
):  # fmt: skip
    """Copy pieces of tensors to their places in one run: program c copies one chunk of a piece."""
    c = tl.program_id(0).to(tl.int64)
    piece = tl.load(chunk_piece + c)
    at, size, to = tl.load(piece_at + piece), tl.load(sizes + piece), tl.load(begins + piece)
    columns, stride = tl.load(piece_columns + piece), tl.load(piece_strides + piece)
    first = (c - tl.load(first_chunk + piece)) * CHUNK
    source, target = at + first * ITEM, run.to(tl.int64) + (to + first) * ITEM
    if (stride == 0) & (first + CHUNK <= size) & (((source | target) & 7) == 0):
        _copy_words(source, target, ITEM)
    else:
        j = first + tl.arange(0, CHUNK)
        bits = load_bits(at, _flat(0, j, 0, columns, stride), j < size, ITEM)
        tl.store(run + to + j, bits, mask=j < size)


@triton.jit
def scatter_pieces(
    piece_at, sizes, piece_columns, piece_strides, begins, chunk_piece, first_chunk, run, ITEM: tl.constexpr
):  # fmt: skip
    """Copy pieces from their places in one run to tensors: the reverse of `gather_pieces`."""
    c = tl.program_id(0).to(tl.int64)
    piece = tl.load(chunk_piece + c)
    at, size, place = tl.load(piece_at + piece), tl.load(sizes + piece), tl.load(begins + piece)
    columns, stride = tl.load(piece_columns + piece), tl.load(piece_strides + piece)
    first = (c - tl.load(first_chunk + piece)) * CHUNK
    source, target = run.to(tl.int64) + (place + first) * ITEM, at + first * ITEM
    if (stride == 0) & (first + CHUNK <= size) & (((source | target) & 7) == 0):
        _copy_words(source, target, ITEM)
    else:
        j = first + tl.arange(0, CHUNK)
        bits = tl.load(run + place + j, mask=j < size, other=0)
        store_bits(at, _flat(0, j, 0, columns, stride), bits, j < size, ITEM)


@triton.jit(do_not_specialize=["first"])
def apply_pieces(
    first, block_begins, first_piece, last_piece, piece_begins, piece_at, piece_columns, piece_strides, change_starts,
    positions, values, ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Write changed weights of bundles into their tensors: the blocks from `first` on.

    Given for each block: the piece of its first weight, and the one after the piece of its last.
    """
    b = tl.program_id(0)
    begin = tl.load(block_begins + b)
    low, high = tl.load(first_piece + b), tl.load(last_piece + b)
    from_, end = tl.load(change_starts + first + b), tl.load(change_starts + first + b + 1)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = begin + tl.load(positions + j, mask=some, other=0).to(tl.int64)
        piece = find_last(piece_begins, low, high - low, i, 1)
        inside = i - tl.load(piece_begins + piece, mask=some, other=0)
        columns = tl.load(piece_columns + piece, mask=some, other=1)
        stride = tl.load(piece_strides + piece, mask=some, other=0)
        inside = tl.where(stride == 0, inside, (inside // columns) * stride + inside % columns)
        at = tl.load(piece_at + piece, mask=some, other=0)
        store_bits(at, inside, tl.load(values + j, mask=some, other=0), some, ITEM)


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
def _chunk_key(chunk, which):
    """The first of both keys, or the second."""
    z = chunk.to(tl.uint64) * 0x9E3779B97F4A7C15
    return _mix(tl.where(which == 0, z + FIRST_SEED, z + SECOND_SEED))


@triton.jit
def _add_digest_changes(first, second, p, old, new, some, pieces, first_piece, count, apart, keys, ITEM: tl.constexpr):
    """Add to sums how changes change the digest, given their positions in their tile."""
    per: tl.constexpr = (ITEM + 1) // 2
    row = pieces + 5 * find_last(pieces, first_piece, count, p, 5)
    i = p - tl.load(row)
    if apart != 0:
        columns, stride = tl.load(row + 2), tl.load(row + 3)
        i = tl.where(stride == 0, i, (i // columns) * stride + i % columns)
    i = (tl.load(row + 1) + i) * per
    offset = tl.load(row + 4)
    for unit in tl.static_range(per):
        moved = ((new >> (16 * unit)) & 0xFFFF) - ((old >> (16 * unit)) & 0xFFFF)
        left, right = _chunk_keys(offset + ((i + unit) >> CHUNK_BITS))
        place = (i + unit) & (CHUNK - 1)
        first += moved * tl.load(keys + place, mask=some, other=0).to(tl.uint64) * left
        second += moved * tl.load(keys + CHUNK + place, mask=some, other=0).to(tl.uint64) * right
    return first, second


@triton.jit
def digest_change(
    begins, block_pieces, pieces, change_starts, positions, before, after, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """How the changes of each block change the digest: every 16-bit unit times the key of its index in its tensor.

    pieces: rows of `Tile.piece_table`. block_pieces: for each block its first row, the number of its rows, and whether
    a piece of it is not contiguous.
    """
    b = tl.program_id(0)
    begin = tl.load(begins + b)
    first_piece, count, apart = (
        tl.load(block_pieces + 3 * b), tl.load(block_pieces + 3 * b + 1), tl.load(block_pieces + 3 * b + 2),
    )  # fmt: skip
    from_, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        p = begin + tl.load(positions + j, mask=some, other=0).to(tl.int64)
        old = tl.load(before + j, mask=some, other=0).to(tl.uint64)
        new = tl.load(after + j, mask=some, other=0).to(tl.uint64)
        first, second = _add_digest_changes(
            first, second, p, old, new, some, pieces, first_piece, count, apart, keys, ITEM
        )  # fmt: skip
    tl.atomic_add(sums + 2 * b, tl.sum(first.to(tl.int64)))
    tl.atomic_add(sums + 2 * b + 1, tl.sum(second.to(tl.int64)))


@triton.jit
def read_old(
    block_at, begins, block_pieces, pieces, change_starts, positions, before, after, keys, sums,
    ITEM: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Read the weights that changes replace, and count how the digest changes, as `digest_change` does."""
    b = tl.program_id(0)
    at, begin = tl.load(block_at + b), tl.load(begins + b)
    first_piece, count, apart = (
        tl.load(block_pieces + 3 * b), tl.load(block_pieces + 3 * b + 1), tl.load(block_pieces + 3 * b + 2),
    )  # fmt: skip
    from_, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    first = tl.zeros([SPAN], tl.uint64)
    second = tl.zeros([SPAN], tl.uint64)
    for k in range(from_ + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        position = tl.load(positions + j, mask=some, other=0).to(tl.int64)
        old = load_bits(at, position, some, ITEM)
        tl.store(before + j, old, mask=some)
        new = tl.load(after + j, mask=some, other=0).to(tl.uint64)
        first, second = _add_digest_changes(
            first, second, begin + position, old.to(tl.uint64), new, some, pieces, first_piece, count, apart, keys, ITEM
        )  # fmt: skip
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
def _every_other_byte(x, HIGH: tl.constexpr):
    """Bytes 0, 2, 4 and 6 of words of eight as words of four, or bytes 1, 3, 5 and 7."""
    if INTERPRETED:
        x = x >> (8 * HIGH)
        x = (x & 0xFF) | ((x >> 8) & 0xFF00) | ((x >> 16) & 0xFF0000) | ((x >> 24) & 0xFF000000)
        return x.to(tl.uint32)
    else:
        halves = [x.to(tl.uint32), (x >> 32).to(tl.uint32)]
        asm: tl.constexpr = "prmt.b32 $0, $1, $2, 0x7531;" if HIGH else "prmt.b32 $0, $1, $2, 0x6420;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", halves, dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _spread_bytes(x, y):
    """Two words from each of four threads as a row of 32 bytes: (warps, 8, 32)."""
    spread = (tl.join(x, y)[:, :, None] >> (8 * tl.arange(0, 4).to(tl.uint32))[None, None, :]) & 0xFF
    return tl.reshape(spread, [x.shape[0] // 32, 8, 32]).to(tl.float32)


@triton.jit
def _row_sums(a0, a1, b0, b1, c0, c1):
    """Eight rows of `_multiply_add`, for the interpreter; 32 products are far below 2^24, so it is exact."""
    sums = tl.dot(_spread_bytes(a0, a1), tl.permute(_spread_bytes(b0, b1), 0, 2, 1)).to(tl.int32)
    even, odd = tl.split(tl.reshape(sums, [c0.shape[0], 2]))
    return c0 + even, c1 + odd


@triton.jit
def _multiply_add(a0, a1, a2, a3, b, c0, c1, c2, c3):
    """Multiply matrices of bytes, (16, 32) by (32, 8), on the tensor cores of each warp, and add c: sums of 32 bits.

    The distribution over threads is that of PTX (mma.m16n8k32). With g = lane // 4 and t = lane % 4: a0 and a2 are of
    row g, a1 and a3 of row g + 8, and both halves of b of column g. a0, a1 and the low half of b are bytes 4 t to 4 t +
    3 of these, a2, a3 and the high half the same 16 on. c0 and c1 are columns 2 t and 2 t + 1 of row g, c2 and c3 of
    row g + 8. Every tensor has one element per thread, which fixes its place.
    """
    b0, b1 = b.to(tl.uint32), (b >> 32).to(tl.uint32)
    if INTERPRETED:
        c0, c1 = _row_sums(a0, a2, b0, b1, c0, c1)
        c2, c3 = _row_sums(a1, a3, b0, b1, c2, c3)
        return c0, c1, c2, c3
    else:
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _pair(at, i):
    """Words i and i + 1, both inside, by one instruction: their address is a multiple of 16."""
    if INTERPRETED:
        return tl.load(at + i), tl.load(at + i + 1)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.L1::no_allocate.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [(at + i).to(tl.int64)],
            dtype=(tl.uint64, tl.uint64),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _word(at, i, size, UNIT: tl.constexpr):
    """Word i of a run of units; those outside are zero."""
    left = size - (8 // UNIT) * i
    x = tl.load(at + i, mask=(i >= 0) & (left > 0), other=0)
    bits = (8 * UNIT * tl.minimum(tl.maximum(left, 0), 8 // UNIT - 1)).to(tl.uint64)
    return tl.where(left >= 8 // UNIT, x, x & ((tl.full(i.shape, 1, tl.uint64) << bits) - 1))


@triton.jit
def _group_sums(at, i, size, planes, WHOLE: tl.constexpr, UNIT: tl.constexpr, PIECES: tl.constexpr):
    """For 16 chunks, the sums of a warp's units times each byte of their keys.

    See `_multiply_add` for the distribution.

    A piece is eight words of each chunk, two for each of four threads. The two bytes of 16-bit units have separate
    sums. WHOLE: all units are inside, and words are aligned in pairs.
    """
    c0 = tl.zeros(i.shape, tl.int32)
    c1, c2, c3, d0, d1, d2, d3 = c0, c0, c0, c0, c0, c0, c0
    below: tl.constexpr = CHUNK * UNIT  # words from a chunk to the eighth after it
    together: tl.constexpr = min(UNROLL, PIECES)
    for _ in range(0, PIECES, together):
        for piece in tl.static_range(together):
            w = i + 8 * piece
            if WHOLE:
                x, y = _pair(at, w)
                u, v = _pair(at, w + below)
            else:
                x, y = _word(at, w, size, UNIT), _word(at, w + 1, size, UNIT)
                u, v = _word(at, w + below, size, UNIT), _word(at, w + below + 1, size, UNIT)
            if UNIT == 2:
                key = tl.load(planes + 32 * piece)
                c0, c1, c2, c3 = _multiply_add(
                    _every_other_byte(x, False), _every_other_byte(u, False),
                    _every_other_byte(y, False), _every_other_byte(v, False), key, c0, c1, c2, c3,
                )  # fmt: skip
                d0, d1, d2, d3 = _multiply_add(
                    _every_other_byte(x, True), _every_other_byte(u, True),
                    _every_other_byte(y, True), _every_other_byte(v, True), key, d0, d1, d2, d3,
                )  # fmt: skip
            else:
                key, next_key = tl.load(planes + 64 * piece), tl.load(planes + 64 * piece + 1)
                c0, c1, c2, c3 = _multiply_add(
                    x.to(tl.uint32), u.to(tl.uint32), (x >> 32).to(tl.uint32), (u >> 32).to(tl.uint32),
                    key, c0, c1, c2, c3,
                )  # fmt: skip
                d0, d1, d2, d3 = _multiply_add(
                    y.to(tl.uint32), v.to(tl.uint32), (y >> 32).to(tl.uint32), (v >> 32).to(tl.uint32),
                    next_key, d0, d1, d2, d3,
                )  # fmt: skip
        i += 8 * together
        planes += 64 // UNIT * together
    return _join(c0, c1, d0, d1, UNIT), _join(c2, c3, d2, d3, UNIT)


@triton.jit
def _join(c0, c1, d0, d1, UNIT: tl.constexpr):
    """The sum of units times two bytes of a key."""
    c = c0.to(tl.uint64) + (c1.to(tl.uint64) << 8)
    d = d0.to(tl.uint64) + (d1.to(tl.uint64) << 8)
    return c + (d << (8 * (UNIT - 1)))


@triton.jit
def recount(run_at, rows, planes, sums, UNIT: tl.constexpr, PER: tl.constexpr, WARPS: tl.constexpr):
    """Sum the units of runs of weights times their keys: program (r, q) sums the q-th PER chunks, a multiple of 16.

    Units have UNIT bytes: one for weights of one byte, otherwise two. The keys of the 4,096 places in a chunk are the
    same for every chunk, so a matrix of bytes, a row for each chunk, is multiplied by the bytes of these keys: two keys
    of four bytes are eight columns. A sum has at most 4,096 products of two bytes, which fits 32 bits. Each row is then
    multiplied by the key of its chunk.

    rows: for each run its tile, units, the index of the first in its tensor, a multiple of 8 // UNIT, and the tensor's
    offset. planes: `device_key_planes`. WARPS: of a program, each of which processes its own positions of all chunks.
    """
    warps: tl.constexpr = 32 * UNIT if INTERPRETED else WARPS  # the interpreter needs the same time for one as for all
    per: tl.constexpr = 8 // UNIT
    pieces: tl.constexpr = CHUNK // (8 * per * warps)
    r = tl.program_id(0)
    row = rows + 4 * r
    size, begin, offset = tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    chunk = (begin >> CHUNK_BITS) + tl.program_id(1) * PER
    last = (begin + size - 1) >> CHUNK_BITS
    if chunk <= last:
        address = tl.load(run_at + r)
        at = address.to(tl.pointer_type(tl.uint64))
        in_pairs = (address - begin * UNIT) % 16 == 0
        thread = tl.arange(0, 32 * warps)
        warp, lane = thread // 32, thread % 32
        g, t = lane // 4, lane % 4
        own = planes + warp * (CHUNK // warps) + lane * (2 // UNIT)
        word = g * (CHUNK // per) + warp * (8 * pieces) + 2 * t
        total = tl.zeros([32 * warps], tl.uint64)
        for _ in range((tl.minimum(PER, last + 1 - chunk) + 15) // 16):
            skipped = chunk * CHUNK - begin
            i = skipped // per + word
            if (skipped >= 0) & (skipped + 16 * CHUNK <= size) & in_pairs:
                upper, lower = _group_sums(at, i, size, own, True, UNIT, pieces)
            else:
                upper, lower = _group_sums(at, i, size, own, False, UNIT, pieces)
            total += upper * _chunk_key(offset + chunk + g, t // 2)
            total += lower * _chunk_key(offset + chunk + g + 8, t // 2)
            chunk += 16
        total = (total << (16 * (t % 2)).to(tl.uint64)).to(tl.int64)  # of the two lower bytes of keys, or the two upper
        tile = tl.load(row)
        tl.atomic_add(sums + 2 * tile, tl.sum(tl.where(t < 2, total, 0)))
        tl.atomic_add(sums + 2 * tile + 1, tl.sum(tl.where(t < 2, 0, total)))


@triton.jit
def recount_any(run_at, rows, keys, sums, ITEM: tl.constexpr, SPAN: tl.constexpr):
    """The same for any run: of columns of a tensor, or not aligned to words.

    rows: for each run its tile and weights, the number of weights of its piece before it, the index in its tensor of
    the first weight of the piece, the piece's columns, the distance between rows in weights (0: contiguous), and the
    offset.
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
