"""Do the kernels compile for a GPU? Triton's compiler needs none: it comes with the assembler."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU path is NOT tested: pip install triton (Linux only)")

# What each kernel takes, beside constants; "bits" is the unsigned integer of a weight.
ARGUMENTS = {
    "compare": "*i64 *i64 *i64 *i32 *i64 *u32 *i32",
    "collect": "*i64 *i64 *i32 *i64 *u32 *i64 *u32 bits bits",
    "count_classes": "bits *i64 *i64 *i64 *i32 *i64 *i64",
    "mark_hot": "*i64 *i64 *i32 *i64 *i32 *i32 *i32 *u32 *u32 *u32 *i32 *i32 *i32 i32",
    "list_hot": "*i64 *i32 *i64 *i32 *u32 *u32 *i64 *i64 *u8 *i32 *u16 *u32",
    "decide": "*i32 *i64 *u32 *u32 *i64 bits bits *i64 *i64 *u16 *u8 *u32 *i64 *i64",
    "count_rows": "*u16 i64 *i64",
    "count_symbols": "*u16 *u8 i64 *i32 i32 i32",
    "encode": "*u16 *u8 *u32 *i64 *i64 *i32 *u16 *i64 *u16 *i64",
    "pack": "*u16 *i64 *i64 *i64 *u8",
    "decode": "*u16 *i64 *i32 *i64 *i64 *u16 *u16 i32 *i64 *u32 *u8 *u32 *i32",
    "land": "*i64 *i64 *u32 *i64 *u32 *u8 *u32 *u32 bits bits *i32",
    "mark_later": "*i32 *i32 *i64 *i64 *u32 bits bits *u32 *u32 *u32",
    "count_marks": "*u32 *i32",
    "remember": "*u32 *u32 *u32 *u32 *i64 *i64 *u8 i32 *u8",
    "apply": "*i64 *i32 *i64 *i64 *i64 *i64 *i64 *u32 bits",
    "gather": "*i64 i64 bits",
    "digest_change": "*i32 *i64 *i64 *i64 *i64 *i64 *u32 bits bits *u32 *i64",
    "digest_bytes": "*u8 *i64 *i64 *i32 *u32 *i64",
    "recount": "*i64 *i64 *i64 *i32 *u32 *i64",
    "recount_any": "*i64 *i64 *i32 *i64 *i64 *i64 *i64 *u32 *i64",
}
CONSTANTS = {
    "PERIOD": 1021,
    "RUN": 16,
    "SPAN": 1024,
    "PLACES": True,
    "BINS": 32,
    "PER": 64,
    "BITS": 6,
}
SHIFTS = {1: 3, 2: 7, 4: 23, 8: 0}
ANY_SIZE = {"compare", "collect", "apply", "gather", "digest_change", "recount_any"}  # weights of 8 bytes are not coded
BITS = {1: "*u8", 2: "*u16", 4: "*u32", 8: "*u64"}
OPTIONS = {"encode": {"num_warps": 1}, "decode": {"num_warps": 1}, "recount": {"num_warps": 8, "maxnreg": 80}}


def variants(kernel: str, names: list[str]) -> Iterator[dict[str, int | bool]]:
    """Constants that a kernel is launched with: each size of weights, with and without a history, cast or not."""
    sizes = (1, 2, 4, 8) if kernel in ANY_SIZE else (1, 2, 4)
    for item in sizes if {"ITEM", "WIDE"} & set(names) else (2,):
        for history in (False, True) if "HISTORY" in names else (False,):
            for cast in (False, True) if "CAST" in names and item == 2 else (False,):
                yield {"ITEM": item, "SHIFT": SHIFTS[item], "WIDE": item == 4, "HISTORY": history, "CAST": cast}


def compile_all() -> int:
    """Compile every kernel as it is launched; return how many that were."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pulsesync.kernels import cuda

    done = 0
    for name, arguments in ARGUMENTS.items():
        kernel = getattr(cuda, name)
        for own in variants(name, kernel.arg_names):
            constants = {n: {**CONSTANTS, **own}[n] for n in kernel.arg_names if n.isupper()}
            names = [n for n in kernel.arg_names if not n.isupper()]
            types = [BITS[own["ITEM"]] if kind == "bits" else kind for kind in arguments.split()]
            signature = {**dict(zip(names, types, strict=True)), **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=OPTIONS.get(name, {"num_warps": 4}))
            done += 1
    return done


def test_all_kernels_are_here() -> None:
    from pulsesync.kernels import cuda

    assert sorted(ARGUMENTS) == cuda.__all__


@pytest.mark.timeout(300)
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    """In a process of its own: this one's Triton interprets."""
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, __file__],
        env={**clean, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == 66


if __name__ == "__main__":
    print(compile_all())
