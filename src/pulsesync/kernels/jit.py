"""How the kernels are compiled, and the machine instructions that numba has no name for."""

import logging
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

U = np.uint64  # numba makes floats of sums of signed and unsigned numbers: kernels count in unsigned ones throughout
ONE = U(1)
NEVER = ~U(0)  # a position that no weight has

# numba logs every step of its compiler at DEBUG: 53,000 lines for our kernels in a program whose root logger is set to
# that level. A level that the program has set is left alone.
if logging.getLogger("numba").level == logging.NOTSET:
    logging.getLogger("numba").setLevel(logging.WARNING)


def can_cache() -> bool:
    """Whether numba finds a folder to keep compiled kernels in; it refuses to decorate where it does not."""
    try:
        njit(cache=True)(can_cache)
    except RuntimeError:
        return False
    return True


compiled = njit(nogil=True, cache=can_cache(), error_model="numpy", no_cfunc_wrapper=True)
inner = njit(nogil=True, cache=can_cache(), error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)


@intrinsic
def trailing_zeros(typing_context: Any, x: Any) -> Any:
    """The number of zero bits below the lowest set bit of a uint64."""
    return types.uint64(types.uint64), lambda _, builder, __, args: builder.cttz(args[0], ir.Constant(ir.IntType(1), 0))


@intrinsic
def store_word(typing_context: Any, array: Any, at: Any, word: Any) -> Any:
    """Write a uint64 into an array of bytes, at any address, low byte first."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(64).as_pointer())
        builder.store(args[2], place, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64), generate


@intrinsic
def popcount(typing_context: Any, x: Any) -> Any:
    """The number of set bits of a uint64."""
    return types.uint64(types.uint64), lambda _, builder, __, args: builder.ctpop(args[0])
