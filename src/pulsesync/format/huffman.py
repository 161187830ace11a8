"""zstd frames of bytes that do not repeat, such as the exponents of weights: Huffman codes and nothing else.

libzstd always searches for repetitions, which takes longer than coding such bytes, and has no setting to disable it.
Any zstd decoder reads these frames (RFC 8878): blocks of literals without sequences, which share one Huffman tree.
"""

from collections.abc import Sequence
from operator import mul

import numpy as np

from pulsesync import kernels
from pulsesync.kernels.arrays import I64, U8, U32

MAX_SYMBOL = 128  # the highest byte that the plain form of a tree can have
MAX_BITS = 11  # of a code
MIN_BITS = 1.5  # per byte, on average: shorter codes mean repetitions, most likely of one byte, which libzstd finds
BLOCK_BYTES = 1 << 17
MIN_BYTES = 1 << 12
RUNS, RUN_BYTES = 16, 1 << 10  # of the bytes that are counted
_MAGIC = bytes.fromhex("28b52ffd")
_ONE_SEGMENT = 0xA0  # no window, 4 bytes of content size, no checksum


def frame(data: U8) -> list[bytes | memoryview] | None:
    """Code many bytes as one zstd frame, in pieces; None where this is not possible, or not worth it."""
    if data.size < MIN_BYTES or data.size % 8 or int(data[:RUN_BYTES].max()) > MAX_SYMBOL:
        return None
    for estimate in (_estimate, _count):  # the latter only if there are bytes that the former did not expect
        counts = estimate(data)
        lengths = _code_lengths(counts)
        if lengths is None or sum(map(mul, counts, lengths)) < MIN_BITS * sum(counts):
            return None
        blocks = -(-data.size // BLOCK_BYTES)
        borders = np.arange(blocks + 1) * (data.size // 8) // blocks * 4  # in pairs of bytes
        out = np.empty(data.size * 3 // 2 + 64, np.uint8)
        sizes = kernels.active().huffman_streams(data.view(np.uint16), borders, _pair_codes(lengths), out)
        if sizes.size:
            return _assemble(data.size, lengths, 2 * np.diff(borders), sizes, out)
    return None


def _estimate(data: U8) -> list[int]:
    """Approximate counts of each byte, with small counts for bytes that were not in the sample but are expected.

    Each exponent occurs half as often as the next higher one, down to the smallest; zero is separate.
    """
    step = data.size // RUNS
    counted = _count(data[: RUNS * step].reshape(RUNS, step)[:, :RUN_BYTES].reshape(-1))
    met = [symbol for symbol in range(1, 256) if counted[symbol]] or [0]
    for symbol in (0, *range(max(met[0] - 10, 0), min(met[-1] + 2, MAX_SYMBOL) + 1)):
        counted[symbol] = counted[symbol] or 1
    return counted


def _count(data: U8) -> list[int]:
    counted: list[int] = np.bincount(data, minlength=256).tolist()
    return counted


def _code_lengths(counts: Sequence[int]) -> list[int] | None:
    """The code length of each byte, 0 for none; None if there is only one byte value, or a byte is too high."""
    used = [symbol for symbol, times in enumerate(counts) if times]
    if len(used) < 2 or used[-1] > MAX_SYMBOL:
        return None
    least = sum(counts) >> MAX_BITS  # so that few codes are too long at the first attempt
    while True:
        times = {symbol: max(counts[symbol], least) for symbol in used}
        order = sorted(used, key=lambda symbol: times[symbol])
        depths = _depths([times[symbol] for symbol in order])
        if max(depths) <= MAX_BITS:
            lengths = [0] * (used[-1] + 1)
            for symbol, depth in zip(order, depths, strict=True):
                lengths[symbol] = depth
            return lengths
        least += least // 2 + 1


def _depths(weights: Sequence[int]) -> list[int]:
    """The depth of each leaf of a Huffman tree, given their weights in ascending order."""
    nodes = [*weights, *([0] * (len(weights) - 1))]  # leaves, then the nodes above them, which ascend as well
    parents = [0] * len(nodes)
    leaf, node = 0, len(weights)
    for above in range(len(weights), len(nodes)):
        for _ in range(2):
            if leaf < len(weights) and (node == above or nodes[leaf] <= nodes[node]):
                child, leaf = leaf, leaf + 1
            else:
                child, node = node, node + 1
            nodes[above] += nodes[child]
            parents[child] = above
    depths = [0] * len(nodes)
    for child in range(len(nodes) - 2, -1, -1):
        depths[child] = depths[parents[child]] + 1
    return depths[: len(weights)]


def _pair_codes(lengths: Sequence[int]) -> U32:
    """The code of each pair of bytes, by the pair as a 16-bit number: its bits, shifted by 5, and their number."""
    used = [symbol for symbol, length in enumerate(lengths) if length]
    codes, value, before = {}, 0, max(lengths)
    for symbol in sorted(used, key=lambda symbol: -lengths[symbol]):  # the longest first, then the lowest byte
        value >>= before - lengths[symbol]
        codes[symbol], before = value, lengths[symbol]
        value += 1
    symbols, long = np.array(used), np.array([lengths[symbol] for symbol in used], np.uint32)
    bits = np.array([codes[symbol] for symbol in used], np.uint32)
    pairs = np.zeros(1 << 16, np.uint32)  # all pairs, because any may be looked up
    both = bits[:, None] << long | bits  # the second byte in memory is coded first, and so in the lower bits
    pairs[symbols[:, None] | symbols << 8] = both << np.uint32(5) | long[:, None] + long
    return pairs


def _assemble(
    size: int, lengths: Sequence[int], contents: I64, sizes: I64, streams: U8
) -> list[bytes | memoryview] | None:
    """Add headers to streams: four per block, of these sizes."""
    if int(sizes.sum()) + 20 * len(sizes) >= size:
        return None
    pieces: list[bytes | memoryview] = [_MAGIC + bytes([_ONE_SEGMENT]) + size.to_bytes(4, "little")]
    tree, begin = _tree(lengths), 0
    for n, (content, four) in enumerate(zip(contents.tolist(), sizes.tolist(), strict=True)):
        end = begin + sum(four)
        packed = len(tree) + 6 + end - begin
        literals = (2 if tree else 3) | 3 << 2 | content << 4 | packed << 22  # a tree or the last one; four streams
        block = (n + 1 == len(sizes)) | 2 << 1 | (5 + packed + 1) << 3  # is it the last, compressed, its size
        jumps = b"".join(one.to_bytes(2, "little") for one in four[:3])
        pieces.append(block.to_bytes(3, "little") + literals.to_bytes(5, "little") + tree + jumps)
        pieces += (streams[begin:end].data, b"\0")  # and no sequences
        tree, begin = b"", end
    return pieces


def _tree(lengths: Sequence[int]) -> bytes:
    """The plain form of a tree: for each byte except the last that has a code, 4 bits for how much shorter it is."""
    longest = max(lengths)
    weights = [longest + 1 - length if length else 0 for length in lengths[:-1]]
    weights += [0] * (len(weights) % 2)
    nibbles = zip(weights[::2], weights[1::2], strict=True)
    return bytes([127 + len(lengths) - 1, *(high << 4 | low for high, low in nibbles)])
