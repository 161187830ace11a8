"""The hot loops for GPUs, in Triton: one launch for all blocks of a dtype.

Weights are read in place: a launch is given the address of every block. Bundles whose weights lie in many tensors are
gathered first, by one launch for all of them. A block is cut into chunks of 4,096 weights, one program each. A property
of few weights of a chunk (changed, or hot) is first written as a bitmap, reading words of eight bytes at memory speed;
a second launch walks the set bits, one thread for 32 weights. A prefix sum over counts yields where a chunk's results
begin, and the number of bits before yields the place inside it. The entropy coder gives each block a warp, whose
threads are the coder's lanes. Results are those of `reference`.

The kernels of a LoCo round (`gpu.rounds`) compute in FP32; all others work on bits.

ITEM is the size of a weight in bytes, SHIFT where its exponent begins. Bits of weights are unsigned integers.
"""

# ruff: noqa: F401 - the kernels of all files are here
# mypy: implicit-reexport

from pulsesync.kernels.gpu.coder import decode, encode, pack
from pulsesync.kernels.gpu.decisions import count_rows, decide, land, step_at
from pulsesync.kernels.gpu.digest import (
    apply,
    apply_pieces,
    digest_bytes,
    digest_change,
    gather_pieces,
    read_old,
    recount,
    recount_any,
    scatter_pieces,
)
from pulsesync.kernels.gpu.marks import (
    collect,
    compare,
    count_classes,
    count_hot_changes,
    count_marks,
    date,
    list_hot,
    mark_later,
    remember,
)
from pulsesync.kernels.gpu.rounds import (
    add_at,
    advance,
    describe,
    divide,
    flag_visible,
    list_visible,
    measure,
    move,
    step_momentum,
)
from pulsesync.kernels.gpu.tables import read_table, table_starts, write_table

__all__ = sorted(name for name in globals() if not name.startswith("_"))
