"""Triton's interpreter, mended for these tests. On a GPU nothing here is done."""

import os
import threading
from typing import Any

import numpy as np


def mend() -> None:
    """Let the interpreter take ~ of unsigned numbers, which fails with numpy 2, and launches from several threads.

    It keeps the program's number and the patched language in globals: two launches at a time spoil each other.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    if hasattr(interpreter.GridExecutor, "mended"):
        return
    launch, lock = interpreter.GridExecutor.__call__, threading.RLock()

    def one_at_a_time(self: Any, *args: Any, **options: Any) -> None:
        with lock:
            launch(self, *args, **options)

    def all_ones(self: Any, type: Any) -> Any:  # noqa: A002 - as it is called
        dtype = np.dtype(interpreter._get_np_dtype(type))
        return interpreter.TensorHandle(np.full(1, np.array(-1).astype(dtype), dtype), type.scalar)

    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.InterpreterBuilder.get_all_ones_value = all_ones
    interpreter.GridExecutor.mended = True
