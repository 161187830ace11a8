"""The constants of the format that kernels share; docs/format.md gives the reasons.

numba caches compiled kernels by the age of their own file only: after changing a number here, or `jit.py` or
`records.py`, touch `cpu.py`, `coder.py` and `rounds.py` too. The tests compare them with `reference` and fail if you
forget.
"""

from typing import Final

ROW: Final = 0x7FFF  # of a decision on a GPU, the row of the tables; the top bit: the weight last moved down
SAMPLE_PERIOD: Final = 1021  # of every 1,021 weights of a block ...
SAMPLE_RUN: Final = 16  # ... the first 16 are read to choose the cut of hot weights
SAMPLE_SCALE: Final = 64  # each stands for 64 weights

PROBABILITY_BITS: Final = 14  # frequencies of a context add up to 2^14
STATE_LOW: Final = 1 << 16  # rANS states live in [2^16, 2^32) and are refilled 16 bits at a time
MAX_LANES_LOG2: Final = 5
LANE_DECISIONS: Final = 4096  # a lane is added for every 4,096 decisions of a block, up to the maximum

DIRECT: Final = 7  # steps of 1..7 units have their own symbols; longer ones share one per power of two

GPU_CHUNK: Final = 4096  # weights that a program of a kernel for GPUs processes
CHUNK_BITS: Final = 12  # the digest multiplies by one key per place in a chunk and one per chunk
DIGEST_SEEDS: Final = (0x70756C7365000001, 0x70756C7365000002)  # "pulse", word 1 and word 2

STREAM_TOO_SHORT: Final = 1
NO_TABLE: Final = 2
OTHER_COUNT: Final = 3
STREAM_TOO_LONG: Final = 4
FOREIGN_WRITE: Final = 5
STEP_TOO_LONG: Final = 6
HOT_AMONG_COLD: Final = 7
COLD_HALF_CIRCLE: Final = 8
FAULTS: Final = {  # what decode_blocks reports
    STREAM_TOO_SHORT: "the stream of a block ends too early",
    NO_TABLE: "a block uses a context for which the part has no table",
    OTHER_COUNT: "a block does not have the number of changes that its header states",
    STREAM_TOO_LONG: "the stream of a block does not end at its last word",
    STEP_TOO_LONG: "a step is longer than half the dtype's range, or half of it in the wrong direction",
    HOT_AMONG_COLD: "a context payload lists a hot weight among the cold changes",
    COLD_HALF_CIRCLE: "a cold change moves by half the dtype's range in the wrong direction",
    FOREIGN_WRITE: "the history does not match the weights: something other than a sync wrote them; a full resync "
    "from an anchor is required",
}
PLACE_SEEDS: Final = (0x706C616365000001, 0x706C616365000002)  # "place", word 1 and word 2

FIRST_OCTAVE: Final = 32  # LoCo payloads: the FP32 exponent field of a border's distance that has the first class
