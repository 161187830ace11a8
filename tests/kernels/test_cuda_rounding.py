"""Are the FP32 operations of a LoCo round rounded one by one on a GPU, as on a CPU? Their machine code says so.

The interpreter cannot: it computes with numpy. Triton's compiler needs no GPU.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the GPU path is NOT tested: pip install triton (Linux only)")

from tests.kernels.test_cuda_compiles import TARGET, run, sources, trust_triton

# The operations that each kernel must have, besides sums
KERNELS = {
    "advance": "mul",
    "flag_visible": "mul",
    "list_visible": "",
    "describe": "",
    "move": "div",
    "step_momentum": "mul div",
    "divide": "div",
    "measure": "",
    "add_at": "",
}


def compile_(source: Any, options: dict[str, Any], fused: bool = False) -> tuple[str, bytes]:
    import triton
    from triton.backends.compiler import GPUTarget

    compiled = triton.compile(source, target=GPUTarget(*TARGET), options={**options, "enable_fp_fusion": fused})
    return compiled.asm["ptx"], compiled.asm["cubin"]


def check(name: str, ptx: str, cubin: bytes, disassembled: bool) -> None:
    assert "fma" not in ptx, f"{name} fuses a product and a sum"
    assert not re.search(r"\b(mul|add|sub)\.f32", ptx), f"{name} lets the assembler fuse"  # which it may without .rn
    assert ".ftz" not in ptx, f"{name} flushes subnormal numbers to zero"
    assert ".approx" not in ptx, f"{name} has an approximation"
    assert ("div.rn.f32" in ptx) == ("div" in KERNELS[name].split()), f"{name}: how does it divide?"
    assert not re.search(r"\bdiv\.(?!rn\.f32)\S*f32", ptx), f"{name} has another division"
    assert ("mul" in KERNELS[name]) == bool(re.search(r"\bmul\.rn\.f32", ptx)), f"{name}: how does it multiply?"
    assert not re.search(r"\b(atom|red)\.\S*f32", ptx), f"{name} adds FP32 numbers in an order that is not fixed"
    if not disassembled or "div" in KERNELS[name].split():
        return  # a division in machine code is made of fused operations, and correct for it
    code = disassemble(cubin)
    assert not re.search(r"\bFFMA\b", code), f"{name} fuses a product and a sum in its machine code"
    assert ".FTZ" not in code, f"{name} flushes subnormal numbers to zero in its machine code"


def disassemble(cubin: bytes) -> str:
    """The machine code as text, by the tool that comes with Triton; nothing where it does not come along."""
    import tempfile

    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    assert "EXIT" in done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_operation_is_fused_flushed_or_approximated(tmp_path: Path) -> None:
    assert run(tmp_path, "compile", script=Path(__file__)) == [11]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nor_is_one_in_machine_code(tmp_path: Path) -> None:
    """The tool that reads it takes half a second for a kernel; the assembler keeps what the test above has seen."""
    assert run(tmp_path, "disassemble", script=Path(__file__)) == [11]


def test_every_kernel_that_computes_in_fp32_is_looked_at() -> None:
    from pulsesync.kernels.gpu import rounds

    found = {name for name, kernel in vars(rounds).items() if hasattr(kernel, "arg_names") and name[0] != "_"}
    assert {name for name in found if rounds.__name__ == getattr(rounds, name).fn.__module__} == set(KERNELS)


def main(disassembled: bool) -> None:
    trust_triton()
    chosen = [(source, options) for source, options in sources() if source.name in KERNELS]
    for source, options in chosen:
        if source.name == "describe":  # of a trend in FP32, too
            signature = {**source.signature, "trend": "*fp32"}
            other = type(source)(fn=source.fn, signature=signature, constexprs=source.constants)
            check(source.name, *compile_(other, options), disassembled)
        check(source.name, *compile_(source, options), disassembled)
        if source.name == "advance":  # so that what is looked for above is what there would be
            assert "fma.rn.f32" in compile_(source, options, fused=True)[0]
    print(len(chosen))


if __name__ == "__main__":
    main(sys.argv[1] == "disassemble")
