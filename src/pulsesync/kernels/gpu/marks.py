"""Marks of weights: those that changed, those that are hot, and their history.

A property of few weights of a chunk is first written as a bitmap, reading words of eight bytes at memory speed; then
the set bits are walked, one thread for 32 weights.
"""

import triton
import triton.language as tl

from pulsesync.kernels.gpu.words import (
    ALL,
    CHUNK,
    ROWS,
    below_cut,
    chunk_words,
    inside,
    load_bits,
    lowest_bit,
    not_zero,
    popcount,
    prefix,
    span_of,
    step_of,
    to_bf16,
)


@triton.jit
def compare(
    old_at, new_at, sizes, chunk_block, first_chunk, bitmap, counts, ITEM: tl.constexpr, CAST: tl.constexpr
):  # fmt: skip
    """Mark and count differences. CAST: old is BF16 and new FP32, which is rounded first."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    begin, count = span_of(c, first_chunk, sizes, b)
    if CAST:
        i = tl.arange(0, ROWS)[:, None] * 32 + tl.arange(0, 32)[None, :]
        old = load_bits(tl.load(old_at + b) + 2 * begin, i, i < count, 2)
        differ = old != to_bf16(load_bits(tl.load(new_at + b) + 4 * begin, i, i < count, 4))
        marks = tl.sum(differ.to(tl.uint32) << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1)
    else:
        x = chunk_words(tl.load(old_at + b), begin, count, ITEM) ^ chunk_words(tl.load(new_at + b), begin, count, ITEM)
        marks = not_zero(x, ITEM)
    marks = inside(marks, count)
    tl.store(bitmap + c * ROWS + tl.arange(0, ROWS), marks)
    tl.store(counts + c, tl.sum(popcount(marks)))


@triton.jit
def collect(
    old_at, new_at, chunk_block, first_chunk, bitmap, offsets, positions, before, after,
    ITEM: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """Write the marked weights, in order: position in the block, old bits, new bits."""
    c = tl.program_id(0).to(tl.int64)
    b = tl.load(chunk_block + c)
    begin = (c - tl.load(first_chunk + b)) * CHUNK
    row = tl.arange(0, ROWS)
    words = tl.load(bitmap + c * ROWS + row)
    n = popcount(words)
    place = tl.load(offsets + c) + prefix(n)
    old_from, new_from = tl.load(old_at + b), tl.load(new_at + b)
    for _ in range(tl.max(n)):
        some = n > 0
        i = begin + 32 * row + popcount(lowest_bit(words) - 1)
        tl.store(positions + place, i.to(tl.uint32), mask=some)
        tl.store(before + place, load_bits(old_from, i, some, ITEM), mask=some)
        if CAST:
            tl.store(after + place, to_bf16(load_bits(new_from, i, some, 4)), mask=some)
        else:
            tl.store(after + place, load_bits(new_from, i, some, ITEM), mask=some)
        words &= words - 1
        place += some.to(tl.int32)
        n -= some.to(tl.int32)


@triton.jit
def count_classes(
    before, change_starts, sizes, old_at, block_tile, by_class, sampled,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, PERIOD: tl.constexpr, RUN: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """For each tile: its changes by the class of the old weight, and the sample of its weights by class."""
    b = tl.program_id(0)
    tile = tl.load(block_tile + b).to(tl.int64)
    bins = tl.arange(0, 256)
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    begin, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    found = tl.zeros([256], tl.int32)
    for k in range(begin, end, SPAN):
        j = k + tl.arange(0, SPAN)
        c = ((tl.load(before + j, mask=j < end, other=0).to(tl.uint32) & mask) >> SHIFT).to(tl.int32)
        found += tl.histogram(c, 256, mask=j < end)
    tl.atomic_add(by_class + tile * 256 + bins, found.to(tl.int64), mask=found > 0)
    size, at = tl.load(sizes + b), tl.load(old_at + b)
    seen = tl.zeros([256], tl.int32)
    for k in range(0, size, PERIOD * (SPAN // RUN)):
        i = k + (tl.arange(0, SPAN) // RUN) * PERIOD + tl.arange(0, SPAN) % RUN
        c = ((load_bits(at, i, i < size, ITEM) & mask) >> SHIFT).to(tl.int32)
        seen += tl.histogram(c, 256, mask=i < size)
    tl.atomic_add(sampled + tile * 256 + bins, seen.to(tl.int64), mask=seen > 0)


@triton.jit
def count_hot_changes(
    block_tile, cuts, first_chunk, change_starts, positions, before, counts,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Count the changes of each chunk whose old bits are below the cut."""
    b = tl.program_id(0)
    cut = tl.load(cuts + tl.load(block_tile + b)).to(tl.int64) << SHIFT
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    end = tl.load(change_starts + b + 1)
    found = tl.zeros([256], tl.int32)  # the most chunks of a block
    for k in range(tl.load(change_starts + b), end, SPAN):
        j = k + tl.arange(0, SPAN)
        chunk = (tl.load(positions + j, mask=j < end, other=0) // CHUNK).to(tl.int32)
        old = tl.load(before + j, mask=j < end, other=0) & mask
        found += tl.histogram(chunk, 256, mask=(j < end) & (old.to(tl.int64) < cut))
    c = tl.load(first_chunk + b) + tl.arange(0, 256)
    tl.store(counts + c, found, mask=c < tl.load(first_chunk + b + 1))


# Kernels are not specialized for values that depend on data; the bytes of a history may begin anywhere.
@triton.jit(do_not_specialize=["segments", "lowest", "classes", "ages"], do_not_specialize_on_alignment=["last"])
def list_hot(
    old_at, sizes, first_chunk, block_tile, cuts, tracked, rooms, known_starts, last, hot_map, known_map, ranks,
    counted, hot_at, known_at, rows, numbers, segments, lowest, classes, ages,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, HISTORY: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Mark the weights of a segment of a block that are below the cut, and list their rows of the tables, in order.

    The list of a block is as long as there is room. For rows, see ROW. With a history, tracked weights are marked too.
    RANKS: also write how many hot weights of a chunk are before each word of its marks. numbers: for each block how
    many weights are hot, and how many tracked, listed or not.

    If there are few blocks, each has several segments, which first count their weights. counted: zeros, in which they
    publish these numbers. Each waits for those of the segments before it in its block, which were started before it:
    programs start in the order of their numbers.
    """
    b, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    tile, size, at = tl.load(block_tile + b), tl.load(sizes + b), tl.load(old_at + b)
    cut = tl.load(cuts + tile).to(tl.int64) << SHIFT
    tracked_cut = tl.load(tracked + tile).to(tl.int64) << SHIFT
    per = (1 << 20) // segments  # weights
    end = tl.minimum(size, (segment + 1) * per)
    found, known_found = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if segments > 1:
        if segment + 1 < segments:
            here = tl.zeros([ROWS], tl.int32)
            for begin in range(segment * per, end, CHUNK):
                count = tl.minimum(size - begin, CHUNK).to(tl.int32)
                x = chunk_words(at, begin, count, ITEM)
                here += popcount(inside(below_cut(x, cut, ITEM), count))
                if HISTORY:
                    here += popcount(inside(below_cut(x, tracked_cut, ITEM), count)) << 16
            total = tl.sum((here & 0xFFFF).to(tl.int64) | ((here >> 16).to(tl.int64) << 24))
            tl.atomic_xchg(counted + tl.program_id(0), (tl.full([], 1, tl.int64) << 48) | total, sem="relaxed")
        earlier = tl.arange(0, 64)  # more than segments
        before = tl.zeros([], tl.int64)
        while before >> 48 < segment:
            before = tl.sum(tl.load(counted + b * segments + earlier, mask=earlier < segment, other=0, volatile=True))
        found, known_found = before & 0xFFFFFF, (before >> 24) & 0xFFFFFF
    place, room_end = tl.load(rooms + b), tl.load(rooms + b + 1)
    listed = room_end > place
    memory, known_end = tl.load(known_starts + b), tl.load(known_starts + b + 1)
    row = tl.arange(0, ROWS)
    c = tl.load(first_chunk + b) + segment * (per // CHUNK)
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    for begin in range(segment * per, end, CHUNK):
        count = tl.minimum(size - begin, CHUNK).to(tl.int32)
        x = chunk_words(at, begin, count, ITEM)
        words = inside(below_cut(x, cut, ITEM), count)
        tl.store(hot_map + c * ROWS + row, words)
        tl.store(hot_at + c, place + found)
        n = popcount(words)
        in_chunk = prefix(n)
        if RANKS:
            tl.store(ranks + c * ROWS + row, in_chunk.to(tl.uint16))
        to = place + found + in_chunk
        found += tl.sum(n)
        known = tl.zeros([ROWS], tl.uint32)
        ages_at = tl.zeros([ROWS], tl.int64)
        if HISTORY:
            known = inside(below_cut(x, tracked_cut, ITEM), count)
            tl.store(known_map + c * ROWS + row, known)
            tl.store(known_at + c, memory + known_found)
            m = popcount(known)
            ages_at = memory + known_found + prefix(m)
            known_found += tl.sum(m)
        if listed:
            for _ in range(tl.max(n)):
                low = lowest_bit(words)
                i = begin + 32 * row + popcount(low - 1)
                some = (words != 0) & (to < room_end)
                kind = ((load_bits(at, i, some, ITEM) & mask) >> SHIFT).to(tl.int32)
                r = tl.minimum(tl.maximum(kind - lowest, 0), classes - 1) * ages
                if HISTORY:
                    kept = ages_at + popcount(known & (low - 1))
                    kept_some = some & ((known & low) != 0) & (kept < known_end)
                    age = tl.load(last + kept, mask=kept_some, other=0).to(tl.int32)
                    r = (r + (age & 0x7F)) | ((age >> 7) << 15)
                tl.store(rows + to, r.to(tl.uint16), mask=some)
                to += (words != 0).to(tl.int64)
                words &= words - 1
        c += 1
    if segment + 1 == segments:
        tl.store(numbers + 2 * b, found)
        tl.store(numbers + 2 * b + 1, known_found)


@triton.jit
def mark_later(
    block_tile, cuts, first_chunk, change_starts, positions, after, later,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Mark in `later` which of the changed weights are below the cut afterwards."""
    b = tl.program_id(0)
    cut = tl.load(cuts + tl.load(block_tile + b)).to(tl.int64) << SHIFT
    begin, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    first = tl.load(first_chunk + b) * ROWS
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = tl.load(positions + j, mask=some, other=0)
        word, bit = first + (i // 32).to(tl.int64), tl.full([SPAN], 1, tl.uint32) << (i % 32)
        below = (tl.load(after + j, mask=some, other=1).to(tl.uint32) & mask).to(tl.int64) < cut
        tl.atomic_or(later + word, bit, mask=some & below, sem="relaxed")
        tl.atomic_and(later + word, bit ^ ALL, mask=some & (below == 0), sem="relaxed")


@triton.jit
def count_marks(bitmap, counts, ranks, chunks, SPAN: tl.constexpr):
    """Count the set bits of each chunk, and those before each of its words: a program processes SPAN chunks."""
    c = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    word = c[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    n = popcount(tl.load(bitmap + word, mask=(c < chunks)[:, None], other=0))
    tl.store(counts + c, tl.sum(n, axis=1), mask=c < chunks)
    tl.store(ranks + word, (tl.cumsum(n, axis=1) - n).to(tl.uint16), mask=(c < chunks)[:, None])


@triton.jit(do_not_specialize_on_alignment=["last"])
def remember(known_map, later, known_at, later_at, last, remembered):
    """For each weight below the cut afterwards, what the history says of it before; 0: it was not tracked."""
    c = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)
    known, words = tl.load(known_map + c * ROWS + row), tl.load(later + c * ROWS + row)
    n = popcount(words)
    memory = tl.load(known_at + c) + prefix(popcount(known))
    place = tl.load(later_at + c) + prefix(n)
    for _ in range(tl.max(n)):
        some = n > 0
        low = lowest_bit(words)
        kept = some & ((known & low) != 0)
        age = tl.load(last + memory + popcount(known & (low - 1)), mask=kept, other=0)
        tl.store(remembered + place, age, mask=some)
        words &= words - 1
        place += some.to(tl.int32)
        n -= some.to(tl.int32)


@triton.jit(do_not_specialize=["index"])
def date(
    block_tile, cuts, first_chunk, change_starts, positions, before, after, later, ranks, later_at, index, remembered,
    ITEM: tl.constexpr, SHIFT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Note for each changed weight below the cut afterwards that patch `index` changed it, and the direction."""
    b = tl.program_id(0)
    cut = tl.load(cuts + tl.load(block_tile + b)).to(tl.int64) << SHIFT
    begin, end = tl.load(change_starts + b), tl.load(change_starts + b + 1)
    first = tl.load(first_chunk + b)
    mask: tl.constexpr = (1 << (8 * ITEM - 1)) - 1
    for k in range(begin + tl.program_id(1) * SPAN, end, tl.num_programs(1) * SPAN):
        j = k + tl.arange(0, SPAN)
        some = j < end
        i = tl.load(positions + j, mask=some, other=0)
        old = tl.load(before + j, mask=some, other=0).to(tl.uint32)
        new = tl.load(after + j, mask=some, other=1).to(tl.uint32)
        some &= (new & mask).to(tl.int64) < cut
        word, bit = first * ROWS + (i // 32).to(tl.int64), tl.full([SPAN], 1, tl.uint32) << (i % 32)
        rank = tl.load(ranks + word, mask=some, other=0).to(tl.int32)
        rank += popcount(tl.load(later + word, mask=some, other=0) & (bit - 1))
        place = tl.load(later_at + first + (i // CHUNK).to(tl.int64), mask=some, other=0) + rank
        _, _, _, falls = step_of(old, new, ITEM)
        tl.store(remembered + place, (index + tl.where(falls, 128, 0)).to(tl.uint8), mask=some)
