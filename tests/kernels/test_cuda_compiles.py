"""Do the kernels compile for a GPU? Triton's compiler needs none: it comes with the assembler."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU path is NOT tested: pip install triton (Linux only)")

# The arguments of each kernel, except constants; "bits" is the unsigned integer of a weight.
ARGUMENTS = {
    "compare": "*i64 *i64 *i64 *i32 *i64 *u32 *i32",
    "collect": "*i64 *i64 *i32 *i64 *u32 *i64 *u32 bits bits",
    "count_classes": "bits *i64 *i64 *i64 *i32 *i64 *i64",
    "count_hot_changes": "*i32 *i32 *i64 *i64 *u32 bits *i32",
    "list_hot": "*i64 *i64 *i64 *i32 *i32 *i32 *i64 *i64 *u8 *u32 *u32 *u16 *i64 *i64 *i64 *u16 *i64 i32 i32 i32 i32",
    "decide": "*i32 *i64 *u32 *i64 *u32 bits bits *i64 *i64 *u16 *u8 *u32 *i64 *i64 *i32 i32 i32 *i32 i32",
    "count_rows": "*u16 *i64 *i64 *i32 i32 i32 i32",
    "encode": "*i32 *i32 *i32 *u16 *u8 *u32 *i64 *i64 *i64 *u64 i32 *i64 *u16 *i64",
    "pack": "*u16 *i64 *i64 *i64 *u8",
    "decode": "*i32 *i32 *i32 *i64 *u16 *i64 *i64 *i64 *u16 *u16 *u64 i32 i32 *i64 *u32 *u32 *i32",
    "land": "*i64 *i64 *i64 *u32 *u16 *i64 *i64 *i64 *u32 *u32 *u32 *u32 bits bits *i32",
    "step_at": "*i64 *i32 *i32 *i64 *u32 *i64 bits bits *i32",
    "mark_later": "*i32 *i32 *i64 *i64 *u32 bits *u32",
    "count_marks": "*u32 *i32 *u16 i32",
    "remember": "*u32 *u32 *i64 *i64 *u8 *u8",
    "date": "*i32 *i32 *i64 *i64 *u32 bits bits *u32 *u16 *i64 i32 *u8",
    "apply": "*i64 *i32 *i64 *i64 *i64 *i64 *i64 *u32 bits",
    "apply_pieces": "i32 *i64 *i64 *i64 *i64 *i64 *i64 *i64 *i64 *u32 bits",
    "gather_pieces": "*i64 *i64 *i64 *i64 *i64 *i32 *i64 bits",
    "scatter_pieces": "*i64 *i64 *i64 *i64 *i64 *i32 *i64 bits",
    "write_table": "*i64 *i64 *i64 *i64 *u32 bits",
    "table_starts": "*i32 *i64 *i64 *i64 *i64 *i64",
    "read_table": "*i64 *i64 *i64 *i64 *i64 *u32 bits *i32",
    "read_old": "*i64 *i64 *i64 *i64 *i64 *u32 bits bits *u32 *i64",
    "digest_change": "*i64 *i64 *i64 *i64 *u32 bits bits *u32 *i64",
    "digest_bytes": "*u8 *i64 *i64 *i32 *u32 *i64",
    "recount": "*i64 *i64 *u64 *i64",
    "recount_any": "*i64 *i64 *u32 *i64",
    "advance": "*fp32 *fp32 *fp32 *fp32 fp32 fp32 *fp32 *fp32 i32",
    "flag_visible": "*fp32 *fp32 fp32 *u32 *i32 *i32 i32",
    "list_visible": "*fp32 *u32 *i64 i64 *i64 *fp32",
    "describe": "*fp32 *i8 *u16 i32",
    "move": "*fp32 *fp32 fp32 *i8 *i32 *i32 *i32 i32",
    "step_momentum": "*fp32 *fp32 *fp32 fp32 fp32 fp32 *fp32 *fp32 i32",
    "divide": "*fp32 fp32 *fp32 i32",
    "measure": "*fp32 *i32 *i32 i32",
    "add_at": "*fp32 *i64 *fp32 i64",
}
CONSTANTS = {"PERIOD": 1021, "RUN": 16, "SPAN": 1024, "RANKS": True, "PER": 64, "WARPS": 4, "BITS": 6}
SPANS = {"count_marks": {"SPAN": 8}, "decide": {"SPAN": 64}}  # as they are launched
TARGET = ("cuda", 90, 32)
SHARES = 3
SHIFTS = {1: 3, 2: 7, 4: 23, 8: 0}
# Weights of 8 bytes are not coded.
ANY_SIZE = {
    "compare", "collect", "apply", "apply_pieces", "gather_pieces", "scatter_pieces", "write_table",
    "read_table", "read_old", "digest_change", "recount_any", "step_at",
}  # fmt: skip
BITS = {1: "*u8", 2: "*u16", 4: "*u32", 8: "*u64"}
OPTIONS = {name: {"num_warps": 1} for name in ("encode", "decide", "decode")}


def variants(kernel: str, names: list[str]) -> Iterator[dict[str, int | bool]]:
    """Constants that a kernel is launched with: each size of weights, with and without a history, cast or not."""
    sizes = [1, 2] if "UNIT" in names else [1, 2, 4, 8] if kernel in ANY_SIZE else [1, 2, 4]
    for item in sizes if {"ITEM", "WIDE", "UNIT"} & set(names) else [2]:
        for history in (False, True) if {"HISTORY", "NESTEROV"} & set(names) else (False,):
            for cast in (False, True) if "CAST" in names and item == 2 else (False,):
                size = {"ITEM": item, "UNIT": item, "SHIFT": SHIFTS[item], "WIDE": item == 4}
                yield {**size, "HISTORY": history, "NESTEROV": history, "CAST": cast}


def sources() -> Iterator[tuple[Any, dict[str, int]]]:
    """Every kernel as it is launched, and the options of the launch."""
    from triton.compiler import ASTSource

    from pulsesync.kernels import cuda

    for name, arguments in ARGUMENTS.items():
        kernel = getattr(cuda, name)
        for own in variants(name, kernel.arg_names):
            constants = {n: {**CONSTANTS, **own, **SPANS.get(name, {})}[n] for n in kernel.arg_names if n.isupper()}
            names = [n for n in kernel.arg_names if not n.isupper()]
            types = [BITS[own["ITEM"]] if kind == "bits" else kind for kind in arguments.split()]
            signature = {**dict(zip(names, types, strict=True)), **dict.fromkeys(constants, "constexpr")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            yield source, OPTIONS.get(name, {"num_warps": 4})


def translate(source: Any, options: dict[str, int]) -> None:
    """Let Triton's front end read a kernel: it checks names, types and shapes, and writes its intermediate code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.compiler.compiler import ir

    target = GPUTarget(*TARGET)
    backend, context = make_backend(target), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    parsed = backend.parse_options(dict(options))
    made = backend.get_codegen_implementation(parsed), backend.get_module_map()
    assert source.make_ir(target, parsed, *made, context).verify()


def assemble(source: Any, options: dict[str, int]) -> None:
    """Compile a kernel to machine code, as a launch does; a thread of a recount must have one element of a tensor."""
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget(*TARGET), options=options)
    if source.name != "recount":
        return
    layouts = re.findall(r"^#\w+ = (#ttg.*)$", compiled.asm["ttgir"], re.MULTILINE)
    one = "sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [4], order = [0]"
    assert layouts == [f"#ttg.blocked<{{{one}}}>"], layouts


def run(cache: Path, *steps: str, script: Path = Path(__file__)) -> list[int]:
    """Take steps, each "step:kernel", in a process of their own, as this one's Triton interprets; count the kernels.

    Instead of a kernel: "all", or a share of them.
    """
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, script, *steps],
        env={**clean, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return [int(line) for line in ran.stdout.splitlines()]


def test_all_kernels_are_here() -> None:
    from pulsesync.kernels import cuda

    assert sorted(ARGUMENTS) == cuda.__all__


@pytest.mark.timeout(300)
def test_the_front_end_accepts_every_kernel_and_one_compiles_to_machine_code(tmp_path: Path) -> None:
    """An error in a kernel is nearly always found by the front end, in a tenth of the time that machine code takes."""
    assert run(tmp_path, "translate:all", "assemble:write_table") == [102, 4]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", range(SHARES))
def test_every_kernel_compiles_to_machine_code(share: int, tmp_path: Path) -> None:
    """And tensor cores find the bytes of a recount in the threads that have them.

    In shares of some 15 s: pytest ends a test that takes 150 s, as one did on a busy machine.
    """
    assert run(tmp_path, f"assemble:{share}") == [len(range(share, 102, SHARES))]


def trust_triton() -> None:
    """Keep Triton from hashing itself for a second and more: its cache is empty, and nothing else will read it."""
    from triton.runtime import cache

    cache.triton_key = lambda: "of this process"


def main() -> None:
    trust_triton()
    for step, which in (order.split(":") for order in sys.argv[1:]):
        count = 0
        for n, (source, options) in enumerate(sources()):
            if which in ("all", source.name, str(n % SHARES)):
                {"translate": translate, "assemble": assemble}[step](source, options)
                count += 1
        print(count)


if __name__ == "__main__":
    main()
