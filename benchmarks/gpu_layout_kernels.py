"""Trial kernels in Triton for `bench_gpu_layout.py`: find hot weights, decode `context` blocks, recount a digest."""

import triton
import triton.language as tl


@triton.jit
def hot_count(old, counts, cut, CHUNK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    hot = (tl.load(old + i).to(tl.int32) & 0x7FFF) < cut
    tl.store(counts + tl.program_id(0), tl.sum(hot.to(tl.int32)))


@triton.jit
def hot_write(old, offsets, cut, hot_bits, hot_at, CHUNK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    bits = tl.load(old + i)
    hot = (bits.to(tl.int32) & 0x7FFF) < cut
    rank = tl.cumsum(hot.to(tl.int32)) - 1 + tl.load(offsets + tl.program_id(0))
    tl.store(hot_bits + rank, bits, mask=hot)
    tl.store(hot_at + rank, (i & 0xFFFFF).to(tl.int32), mask=hot)


@triton.jit
def decode(
    stream, starts, lanes, hot_starts, hot_bits, hot_at, table, out_starts, out_at, out_bits, ends,
    LO: tl.constexpr, ROW: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One warp decodes one block: its lanes take decisions j, j + 1, … together and share one stream of words."""
    block = tl.program_id(0)
    n = tl.load(lanes + block)
    lane = tl.arange(0, 32)
    words = stream + tl.load(starts + block)
    hot = tl.load(hot_starts + block)
    total = (tl.load(hot_starts + block + 1) - hot).to(tl.int32)
    out = tl.load(out_starts + block)
    on = lane < n
    x = tl.load(words + 2 * lane, mask=on, other=0).to(tl.uint32)
    x = x | (tl.load(words + 2 * lane + 1, mask=on, other=1).to(tl.uint32) << 16)
    one = tl.full([32], 1, tl.uint32)
    at = 2 * n
    found = 0
    for j in range(0, total, n):
        take = on & (j + lane < total)
        bits = tl.load(hot_bits + hot + j + lane, mask=take, other=0).to(tl.int32)
        row = table + tl.maximum(((bits & 0x7FFF) >> 7) - LO, 0) * ROW
        slot = (x & ((1 << P) - 1)).to(tl.int32)
        start = tl.zeros_like(slot)
        end = tl.load(row + 1, mask=take, other=1 << P)
        symbol = tl.zeros_like(lane)
        search = (take & (slot >= end)).to(tl.int32)
        while tl.max(search) > 0:
            symbol += search
            start = tl.where(search > 0, end, start)
            end = tl.where(search > 0, tl.load(row + symbol + 1, mask=search > 0, other=0), end)
            search = ((search > 0) & (slot >= end)).to(tl.int32)
        y = (end - start).to(tl.uint32) * (x >> P) + (slot - start).to(tl.uint32)
        # how many words each lane needs is known before any is read: one prefix sum serves all of them
        size_class = (symbol - 1) >> 1
        raw = tl.where(take & (symbol > 0) & (size_class >= 7), size_class - 4, 0).to(tl.uint32)
        first = take & (y < 65536)
        second = (raw > 0) & ((tl.where(first, y << 16, y) >> raw) < 65536)
        change = take & (symbol > 0)
        need = first.to(tl.int32) + second.to(tl.int32) + (change.to(tl.int32) << 16)
        before = tl.cumsum(need) - need
        mine = words + at + (before & 0xFFFF)
        y = tl.where(first, (y << 16) | tl.load(mine, mask=first, other=0).to(tl.uint32), y)
        extra = y & ((one << raw) - 1)
        y = y >> raw
        mine += first.to(tl.int32)
        y = tl.where(second, (y << 16) | tl.load(mine, mask=second, other=0).to(tl.uint32), y)
        x = tl.where(take, y, x)
        size = tl.where(size_class < 7, size_class + 1, extra.to(tl.int32) + (one << raw).to(tl.int32))
        key = bits ^ tl.where((bits & 0x8000) != 0, 0xFFFF, 0x8000)
        key = (key + tl.where(((symbol - 1) & 1) == 1, -size, size)) & 0xFFFF
        value = key ^ tl.where((key & 0x8000) != 0, 0x8000, 0xFFFF)
        place = out + found + (before >> 16)
        tl.store(out_at + place, tl.load(hot_at + hot + j + lane, mask=change, other=0), mask=change)
        tl.store(out_bits + place, value.to(tl.uint16), mask=change)
        needed = tl.sum(need)
        at += needed & 0xFFFF
        found += needed >> 16
    wrong = tl.sum((on & (x != 65536)).to(tl.int32))
    tl.store(ends + block, tl.where(wrong == 0, at, -1).to(tl.int64))


@triton.jit
def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def recount(units, keys, out, chunks, PER: tl.constexpr):
    """Sum unit * A[place] * B[chunk], A applied last: a unit costs two 64-bit multiply-adds by one number."""
    place = tl.arange(0, 4096)
    a = tl.zeros([4096], tl.uint64)
    b = tl.zeros([4096], tl.uint64)
    for k in range(PER):
        chunk = tl.program_id(0).to(tl.int64) * PER + k
        if chunk < chunks:
            u = tl.load(units + chunk * 4096 + place).to(tl.uint64)
            z = chunk.to(tl.uint64) * 0x9E3779B97F4A7C15
            a += u * _mix(z + 0x70756C7365000001)
            b += u * _mix(z + 0x70756C7365000002)
    a *= tl.load(keys + place).to(tl.uint64)
    b *= tl.load(keys + 4096 + place).to(tl.uint64)
    tl.atomic_add(out, tl.sum(a.to(tl.int64)))
    tl.atomic_add(out + 1, tl.sum(b.to(tl.int64)))
