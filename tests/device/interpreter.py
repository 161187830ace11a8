"""Triton's interpreter, mended for these tests. On a GPU nothing here is done."""

import os
import threading
from typing import Any


def mend() -> None:
    """Let the interpreter take launches from several threads.

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

    interpreter.GridExecutor.__call__ = one_at_a_time
    interpreter.GridExecutor.mended = True
