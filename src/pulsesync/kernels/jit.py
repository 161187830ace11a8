"""How the kernels are compiled, and the machine instructions for which numba has no function."""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

U = np.uint64  # numba turns sums of signed and unsigned numbers into floats: kernels use only unsigned numbers
ONE = U(1)
NEVER = ~U(0)  # a position that no weight has

# numba logs every step of its compiler at DEBUG: 53,000 lines for our kernels in a program whose root logger is set to
# that level. A level that the program has set is not changed.
if logging.getLogger("numba").level == logging.NOTSET:
    logging.getLogger("numba").setLevel(logging.WARNING)


def can_cache() -> bool:
    """Whether numba finds a folder to keep compiled kernels in; without one it refuses to decorate functions."""
    try:
        njit(cache=True)(can_cache)
    except RuntimeError:
        return False
    return True


_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
_kernel = njit(cache=can_cache(), **_OPTIONS)

# What only kernels call is in their machine code. A cache of its own would name the classes of records that it takes,
# and numba fails to read one that names a class of an earlier version.
inner = njit(no_cpython_wrapper=True, **_OPTIONS)
inlined = njit(no_cpython_wrapper=True, forceinline=True, **_OPTIONS)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel that Python calls. What a signal handler raises during a call is raised as it is.

    For every array that a kernel returns, numba calls a function of its own in Python, where a signal handler can run.
    If that raises (KeyboardInterrupt, SystemExit), numba goes on, and CPython makes a SystemError of it: an Exception,
    which programs catch in order to try again. 27 of 300 interrupts of a process that publishes and syncs arrived like
    this. A call costs 0.05 µs more. The arrays of an interrupted call are not freed.
    """
    kernel = _kernel(function)

    @wraps(kernel, updated=())
    def call(*args: Any) -> Any:
        try:
            return kernel(*args)
        except SystemError as e:
            fault: BaseException = e
        while isinstance(fault, SystemError) and fault.__cause__ is not None:  # there is one for each array after it
            fault = fault.__cause__
        raise fault

    return call


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
def copy_from(typing_context: Any, array: Any, at: Any, address: Any, count: Any) -> Any:
    """Copy this many elements from an address into an array, from its index `at` on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        source = builder.inttoptr(args[2], data.type)
        cgutils.raw_memcpy(builder, builder.gep(data, [args[1]]), source, args[3], array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.uint64, types.int64), generate


@intrinsic
def store_at(typing_context: Any, address: Any, at: Any, value: Any) -> Any:
    """Write an element at its index in the memory that begins at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        run = builder.inttoptr(args[0], ir.IntType(value.bitwidth).as_pointer())
        builder.store(args[2], builder.gep(run, [args[1]]), align=value.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64, value), generate


@intrinsic
def borrowed(typing_context: Any, records: Any) -> Any:
    """The same tuple or tuples of arrays, but numba does not count references to these arrays: see `hold`.

    Otherwise, it counts them wherever a function that is given a record takes an array out of it, with atomic
    instructions that cost more than the work.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _without_owners(context, builder, records, args[0])

    return records(records), generate


def _without_owners(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo, array.parent = array.meminfo.type(None), array.parent.type(None)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for k, inside in enumerate(kind.types):
            part = _without_owners(context, builder, inside, builder.extract_value(value, k))
            value = builder.insert_value(value, part, k)
    return value


@intrinsic
def hold(typing_context: Any, records: Any) -> Any:
    """Keep arrays up to here that are `borrowed`: numba frees those that a kernel makes after their last use."""
    return types.none(records), lambda context, *_: context.get_dummy_value()


@intrinsic
def popcount(typing_context: Any, x: Any) -> Any:
    """The number of set bits of a uint64."""
    return types.uint64(types.uint64), lambda _, builder, __, args: builder.ctpop(args[0])


@intrinsic
def prefetch(typing_context: Any, bits: Any, start: Any) -> Any:
    """Prefetch the 64 weights from start on, which may be outside the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        data = context.make_array(bits)(context, builder, args[0]).data
        for line in range(0, 64, 512 // bits.dtype.bitwidth):  # of 64 bytes each
            first = builder.gep(data, [builder.add(args[1], args[1].type(line))])
            builder.call(fetch, [builder.bitcast(first, pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.none(bits, types.uint64), generate


@intrinsic
def mark_below(typing_context: Any, bits: Any, start: Any, cut: Any) -> Any:
    """Return which of the 64 weights from start on have a magnitude below the cut, as bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights = _load_64(context, builder, bits, args[0], args[1])
        magnitudes = builder.and_(weights, weights.type([(1 << (bits.dtype.bitwidth - 1)) - 1] * 64))
        return _packed(builder, builder.icmp_unsigned("<", magnitudes, _repeated(builder, args[2], 64)))

    return types.uint64(bits, types.uint64, bits.dtype), generate


@intrinsic
def mark_changed(typing_context: Any, old: Any, new: Any, start: Any) -> Any:
    """Return which of the 64 weights from start on differ, as bits of a uint64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        before, after = (_load_64(context, builder, k, a, args[2]) for k, a in ((old, args[0]), (new, args[1])))
        return _packed(builder, builder.icmp_unsigned("!=", before, after))

    return types.uint64(old, new, types.uint64), generate


def _load_64(context: Any, builder: Any, kind: Any, array: Any, start: Any) -> Any:
    """A vector of the 64 weights of an array from start on."""
    width = kind.dtype.bitwidth
    first = builder.gep(context.make_array(kind)(context, builder, array).data, [start])
    pointer = ir.VectorType(ir.IntType(width), 64).as_pointer()
    return builder.load(builder.bitcast(first, pointer), align=width // 8)


def _packed(builder: Any, flags: Any) -> Any:
    """64 flags as the bits of a number. A plain bitcast takes one instruction per flag before LLVM 17."""
    bytes_ = ir.VectorType(ir.IntType(8), 64)
    found = builder.and_(builder.sext(flags, bytes_), bytes_([1 << k % 8 for k in range(64)]))
    for size in (64, 32, 16):  # neighbours are added up, until the bits of eight weights are together in a byte
        even, odd = (ir.VectorType(ir.IntType(32), size // 2)(list(range(k, size, 2))) for k in (0, 1))
        nothing = found.type(ir.Undefined)
        found = builder.add(builder.shuffle_vector(found, nothing, even), builder.shuffle_vector(found, nothing, odd))
    return builder.bitcast(found, ir.IntType(64))


@intrinsic
def list_marked(typing_context: Any, mark: Any, first: Any, table: Any, places: Any, at: Any) -> Any:
    """Write `first` plus the index of each set bit of a uint64 to places (uint16), from `at` on; return their number.

    The table (uint16) lists the set bits of every byte, in eight entries each. All eight are written for each of the
    eight bytes, so that there is no branch on their number: places needs space for eight more.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word, eight = ir.IntType(64), ir.VectorType(ir.IntType(16), 8)
        bytes_ = ir.VectorType(ir.IntType(8), 8)
        lists, out = (context.make_array(k)(context, builder, a).data for k, a in ((table, args[2]), (places, args[3])))
        count = cgutils.get_or_insert_function(builder.module, ir.FunctionType(bytes_, [bytes_]), "llvm.ctpop.v8i8")
        counts = builder.bitcast(builder.call(count, [builder.bitcast(args[0], bytes_)]), word)
        sums = builder.mul(counts, word(0x0101010101010101))  # in byte q, the number of bits set up to there
        at = args[4]
        for q in range(8):
            byte = builder.and_(builder.lshr(args[0], word(8 * q)), word(0xFF))
            source = builder.bitcast(builder.gep(lists, [builder.shl(byte, word(3))]), eight.as_pointer())
            base = builder.trunc(builder.add(args[1], word(8 * q)), ir.IntType(16))
            found = builder.add(builder.load(source, align=2), _repeated(builder, base, 8))
            builder.store(found, builder.bitcast(builder.gep(out, [at]), eight.as_pointer()), align=2)
            at = builder.add(args[4], builder.and_(builder.lshr(sums, word(8 * q)), word(0xFF)))
        return builder.lshr(sums, word(56))

    number = types.uint64
    return number(number, number, table, places, number), generate


def _repeated(builder: Any, value: Any, times: int) -> Any:
    """A vector of equal values."""
    vector = ir.VectorType(value.type, times)
    first = builder.insert_element(vector(ir.Undefined), value, ir.IntType(32)(0))
    return builder.shuffle_vector(first, vector(ir.Undefined), ir.VectorType(ir.IntType(32), times)([0] * times))
