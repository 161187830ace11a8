"""Which kernels Triton compiles: counted by its own hook on a GPU, and by its own key in its interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, compute_cache_key, create_function_from_signature

from pulsesync.kernels import cuda

TARGET = GPUTarget("cuda", 90, 32)
OF_ROUNDS = {name for name in cuda.__all__ if getattr(cuda, name).fn.__module__.endswith("gpu.rounds")}
OF_GROUPS = {"read_old", "read_table", "scatter_pieces", "table_starts", "write_table"}
OF_RUNS = set(cuda.__all__) - OF_ROUNDS - OF_GROUPS  # the kernels of publishers and subscribers


@dataclass(frozen=True)
class Compiled:
    """A kernel, and the key under which Triton keeps what it compiled: types, constants, alignments and options."""

    kernel: str
    key: str


@contextmanager
def counted() -> Iterator[list[Compiled]]:
    """Collect what Triton compiles inside the block, beginning with nothing compiled.

    The interpreter compiles nothing. There each launch is bound by Triton's own binder for a GPU, and a key that was
    not seen before is what a GPU would have to compile.
    """
    found: list[Compiled] = []
    with pytest.MonkeyPatch.context() as patched:
        if isinstance(cuda.compare, JITFunction):
            for name in cuda.__all__:
                getattr(cuda, name).device_caches.clear()
            patched.setattr(knobs.runtime, "jit_post_compile_hook", _hook(found))
        else:
            patched.setattr(InterpretedFunction, "run", _observed(InterpretedFunction.run, found))
        yield found


def _hook(found: list[Compiled]) -> Any:
    def compiled(*, key: str, fn: Any, **_: Any) -> None:
        found.append(Compiled(fn.name, key))

    return compiled


def _observed(run: Any, found: list[Compiled]) -> Any:
    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = Compiled(kernel.fn.__name__, key_of(kernel, *args, **options))
        if compiled not in found:
            found.append(compiled)
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    return launch


def key_of(kernel: Any, *args: Any, **options: Any) -> str:
    """The key that Triton computes for a launch on a GPU."""
    bound = (_Pointer(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    _, specialization, rest = _binder(kernel)(*bound, **options)
    key: str = compute_cache_key({}, specialization, rest)
    return key


class _Pointer:
    """A tensor as it would lie on a GPU, where every allocation begins at a multiple of 512 bytes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self._offset = tensor.dtype, int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._offset


@cache
def _binder(kernel: Any) -> Any:
    function = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
    return create_function_from_signature(function.signature, function.params, make_backend(TARGET))
