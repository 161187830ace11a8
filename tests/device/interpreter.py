"""Triton's interpreter, made safe and quicker for these tests. On a GPU nothing here is done."""

import os
import threading
from typing import Any


def mend() -> None:
    """Let the interpreter accept launches from several threads, and prepare the language once instead of every time.

    It keeps the program's number in a global: two concurrent launches would spoil each other. At every launch, and at
    every call of one device function from another, it replaces the language's functions by its own; finding them takes
    longer than most of our kernels. Nothing else uses the language in this process, so the replacements stay. And it
    makes every sum a second time in 64 bits, to see whether it overflowed, and then ignores what it found.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if hasattr(interpreter.GridExecutor, "mended"):
        return
    launch, replace, lock = interpreter.GridExecutor.__call__, interpreter._patch_lang, threading.RLock()
    look_up = interpreter._get_np_dtype
    replaced: set[int] = set()
    dtypes: dict[str, Any] = {}

    def one_at_a_time(self: Any, *args: Any, **options: Any) -> None:
        with lock:
            launch(self, *args, **options)

    def replace_once(function: Any) -> Any:
        if id(function.__globals__) not in replaced:
            replace(function)
            replaced.add(id(function.__globals__))
        return interpreter._LangPatchScope()  # of no changes: there is nothing to restore

    def numpy_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = look_up(kind)
        return dtypes[name]

    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.GridExecutor.mended = True
    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = numpy_dtype
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
