"""Triton's interpreter, made safe and quicker for these tests. On a GPU nothing here is done."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


def mend() -> None:
    """Let the interpreter accept launches from several threads, and prepare the language once instead of every time.

    It keeps the program's number in a global: two concurrent launches would spoil each other. At every launch, and at
    every call of one device function from another, it replaces the language's functions by its own; finding them takes
    longer than most of our kernels. Nothing else uses the language in this process, so the replacements stay. And it
    makes every sum a second time in 64 bits, to see whether it overflowed, and then ignores what it found. What is
    left of its time goes into the types of each operation, which are therefore worked out once (see Replays).
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    from pulsesync.kernels.gpu import digest, words

    if hasattr(interpreter.GridExecutor, "mended"):
        return
    launch, replace, lock = interpreter.GridExecutor.__call__, interpreter._patch_lang, threading.RLock()
    look_up, compute_slowly = interpreter._get_np_dtype, interpreter.InterpreterBuilder.binary_op
    handle = interpreter.TensorHandle
    replaced: set[int] = set()
    dtypes: dict[str, Any] = {}
    replays = Replays(interpreter)

    def one_at_a_time(self: Any, *args: Any, **options: Any) -> None:
        with lock:
            launch(self, *args, **options)

    def replace_once(function: Any) -> Any:
        if id(function.__globals__) not in replaced:
            replace(function)
            replaced.add(id(function.__globals__))
        return interpreter._LangPatchScope()  # of no changes: there is nothing to restore

    def replace_member(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(place, name, replays.of(member))

    def binary(self: Any, left: Any, right: Any, compute: Callable[..., Any]) -> Any:
        found = compute(left.data, right.data)
        if found.itemsize > left.data.itemsize:
            return compute_slowly(self, left, right, compute)
        return handle(found, left.dtype.scalar)

    def unchecked(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    def numpy_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.GridExecutor.mended = True
    interpreter._patch_lang = replace_once
    interpreter._patch_attr = replace_member
    interpreter._get_np_dtype = numpy_dtype
    interpreter.InterpreterBuilder.binary_op = binary
    handle.__init__ = unchecked
    interpreter.InterpretedFunction.rewritten_fn |= {
        words.popcount.fn: popcount,
        digest._every_other_byte.fn: every_other_byte,
        digest._row_sums.fn: row_sums,
    }
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


# What our kernels have instructions of a GPU for, and imitate in the interpreter: here by one call of numpy each.

BITS = np.array([byte.bit_count() for byte in range(256)], np.int32)


def popcount(x: Any) -> Any:
    """The number of set bits in 32-bit words."""
    return _tensor(x, BITS[_bytes(x)].sum(-1, dtype=np.int32), "int32")


def every_other_byte(x: Any, high: Any) -> Any:
    """Bytes 0, 2, 4 and 6 of words of eight as words of four, or bytes 1, 3, 5 and 7."""
    chosen = np.ascontiguousarray(_bytes(x)[..., int(getattr(high, "value", high)) :: 2])
    return _tensor(x, chosen.view(np.uint32)[..., 0], "uint32")


def row_sums(a0: Any, a1: Any, b0: Any, b1: Any, c0: Any, c1: Any) -> Any:
    """Eight rows of bytes times eight columns, for each warp; a thread has two words of a row, and one of a column."""
    left, right = (
        np.stack([_bytes(x), _bytes(y)], -2).reshape(-1, 8, 32).astype(np.float32) for x, y in ((a0, a1), (b0, b1))
    )
    sums = (left @ right.transpose(0, 2, 1)).astype(np.int32).reshape(-1, 2)
    return tuple(_tensor(c, c.handle.data + sums[:, i], "int32") for i, c in enumerate((c0, c1)))


def _bytes(x: Any) -> Any:
    data = np.ascontiguousarray(x.handle.data)
    return data.reshape(*data.shape, 1).view(np.uint8)


def _tensor(like: Any, data: Any, dtype: str) -> Any:
    """A tensor of the interpreter's, in the shape of another one."""
    from triton.runtime.interpreter import TensorHandle, tl

    handle = TensorHandle(data, getattr(tl, dtype))
    if like.dtype is not handle.dtype:
        kind = like.type.with_element_ty(handle.dtype) if like.type.is_block() else handle.dtype
        return tl.tensor(handle, kind)
    made = tl.tensor.__new__(tl.tensor)
    made.__dict__.update(vars(like), handle=handle)
    return made


@dataclass(frozen=True)
class Replay:
    """What the interpreter computed for an operation: calls of numpy, each with the places of its arguments."""

    values: list[Any]  # arguments that are no tensors of the operation, and constants that were made from them
    steps: list[tuple[Callable[..., Any], list[int]]]
    result: int  # where the result is among the values, the operation's tensors and the steps' results; -1: none
    members: dict[str, Any]  # of the result, without its handle


class Replays:
    """Operations of the language, each recorded when it is first called with its types and constants, then replayed.

    The interpreter takes 50 microseconds for an addition, all but 3 of them to find the types of its result. They
    depend on the arguments' types and constants alone, as they do for Triton's compiler, which finds them before there
    are values. So the interpreter itself is recorded: what it then calls to compute is called again with new values.
    """

    CONSTANTS = ("get_", "create_splat", "create_make_range")  # calls that are not made again if all they need is given
    MOST = 50_000  # recordings that are kept: positions in loops are constants, too

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._semantic = interpreter, interpreter.interpreter_semantic
        self._tensor = interpreter.tl.tensor
        self._constexpr = interpreter.tl.constexpr
        self._dtype = interpreter.tl.dtype
        self._found: dict[tuple[Any, ...], Replay | None] = {}
        self._recording = False

    def of(self, member: Callable[..., Any]) -> Callable[..., Any]:
        """The same operation, replayed where it was recorded."""
        tensor, find, semantic = self._tensor, self._found.get, self._semantic

        def operation(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            if self._recording:  # as a part of another
                return member(*args, **options, _semantic=semantic)
            key: list[Any] = [member]
            tensors = []
            for arg in (*args, *options.values()) if options else args:
                kind = type(arg)
                if kind is tensor:
                    key.append(arg.type.name)
                    tensors.append(arg.handle)
                elif kind is int or kind is bool:
                    key.append((kind, arg))
                elif (constant := self._constant(arg)) is not None:
                    key.append(constant)
                else:
                    return member(*args, **options, _semantic=semantic)
            key += options
            name = tuple(key)
            replay = find(name)
            if replay is None:
                if name in self._found:  # cannot be replayed
                    return member(*args, **options, _semantic=semantic)
                return self._record(name, tensors, member, args, options)
            places = replay.values + tensors
            for call, at in replay.steps:
                places.append(call(*map(places.__getitem__, at)))
            if replay.result < 0:
                return None
            made = tensor.__new__(tensor)
            made.__dict__.update(replay.members, handle=places[replay.result])
            return made

        return operation

    def _constant(self, value: Any) -> Any:
        """A key for a value that is known when a kernel is compiled; None: for none that is known here."""
        if value is None or isinstance(value, bool | int | str):
            return type(value), value
        if isinstance(value, float):
            return float, value.hex()
        if isinstance(value, self._constexpr):
            inner = self._constant(value.value)
            return inner and ("constexpr", inner)
        if isinstance(value, self._dtype):
            return "dtype", value.name
        if isinstance(value, list | tuple):
            inner = [self._constant(x) for x in value]
            return None if None in inner else (type(value), *inner)
        return None

    def _record(self, name: Any, tensors: list[Any], member: Any, args: Any, options: Any) -> Any:
        builder = self._semantic.builder
        calls: list[tuple[str, Callable[..., Any], tuple[Any, ...] | None, Any]] = []

        class Recorder:
            def __getattr__(self, method: str) -> Any:
                function = getattr(builder, method)
                if not method.startswith(("get_", "create_")):
                    return function

                def call(*values: Any, **more: Any) -> Any:
                    result = function(*values, **more)
                    calls.append((method, function, None if more else values, result))
                    return result

                return call

        self._recording, self._semantic.builder = True, Recorder()
        try:
            result = member(*args, **options, _semantic=self._semantic)
        finally:
            self._recording, self._semantic.builder = False, builder
        if len(self._found) >= self.MOST:
            self._found.clear()
        self._found[name] = self._replay(tensors, calls, result)
        return result

    def _replay(self, tensors: list[Any], calls: list[Any], result: Any) -> Replay | None:
        """A recording as a replay; None, if it has something that is not the same for other values."""
        handle = self._interpreter.TensorHandle
        if not (result is None or type(result) is self._tensor):
            return None
        constants: dict[int, Any] = {}  # by identity, as all that follows
        variables = {id(tensor) for tensor in tensors}
        steps = []
        for method, function, args, made in calls:
            if args is None or any(isinstance(x, handle) for arg in args if isinstance(arg, list | tuple) for x in arg):
                return None
            fixed = {id(arg): arg for arg in args if id(arg) not in variables}
            if method.startswith(self.CONSTANTS) and len(fixed) == len({id(arg) for arg in args}):
                constants[id(made)] = made
            else:
                constants |= fixed
                steps.append((function, [id(arg) for arg in args], id(made)))
                variables.add(id(made))
        members = {"handle": None} if result is None else dict(vars(result))
        made = members.pop("handle")
        if id(made) not in variables:
            constants[id(made)] = made
        places: dict[int, int] = {}
        for i, at in enumerate([*constants, *map(id, tensors), *(made for _, _, made in steps)]):
            places.setdefault(at, i)
        return Replay(
            list(constants.values()),
            [(function, [places[i] for i in at]) for function, at, _ in steps],
            -1 if result is None else places[id(made)],
            members,
        )
