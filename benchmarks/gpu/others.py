"""One version of a model on a GPU, sent whole, in PULSE's published format, by the best public codec, and by pulsesync.

    python benchmarks/bench_gpu_others.py --weights 7.6 --json others.json

The weights are those of gpu.py. The other codecs run in host memory, on all cores where they can: their times
begin and end there, so that neither the copy to the host nor the write to the GPU counts against them. They verify
nothing, or one hash for each tensor, and write while they decode, so the whole decode is their pause. Each result is
compared with the trainer's weights, bit for bit, before its times are reported.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness.baselines import Baseline, Basilica, PulseCoo
from benchmarks.harness.report import provenance, table
from bench_gpu import DEVICE, Model, make, measure, timed

Bits = np.ndarray[Any, np.dtype[np.uint16]]


def on_host(tensors: dict[str, torch.Tensor]) -> dict[str, Bits]:
    return {name: tensor.view(torch.int16).cpu().numpy().view(np.uint16) for name, tensor in tensors.items()}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure_full(model: Model) -> dict[str, Any]:
    """Copy all weights to pinned host memory, and from there over the old ones."""
    source = max(model.new.values(), key=lambda tensor: tensor.numel())
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    share = source.numel() / model.size  # one tensor is copied, and its time scaled: pinning 15 GB takes minutes
    encode_ms = timed(lambda: pinned.copy_(source)) / share
    target = torch.empty_like(source)
    decode_ms = timed(lambda: target.copy_(pinned)) / share
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))
    return row("full weights", 2 * model.size, encode_ms, decode_ms, decode_ms)


def measure_other(codec: Baseline, old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, Any]:
    """Encode and decode once: at this size each takes seconds, and a warm-up would only save memory allocation."""
    patch = b""

    def encode() -> None:
        nonlocal patch
        patch = codec.encode(old, new)

    encode_s = seconds(encode)
    state = {name: bits.copy() for name, bits in old.items()}
    decode_s = seconds(lambda: codec.apply_(state, patch))
    assert all(np.array_equal(state[name], bits) for name, bits in new.items()), codec.name
    return row(codec.name, len(patch), 1e3 * encode_s, 1e3 * decode_s, 1e3 * decode_s)


def row(name: str, size_bytes: int, encode_ms: float, decode_ms: float, pause_ms: float) -> dict[str, Any]:
    times = {"encode_ms": round(encode_ms, 1), "decode_ms": round(decode_ms, 1), "pause_ms": round(pause_ms, 1)}
    print(f"{name}: {size_bytes:,} bytes, {times}", flush=True)
    return {"codec": name, "bytes": size_bytes, **times}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", type=float, default=7.6, help="billions")
    parser.add_argument("--density", type=float, default=1.0, help="per cent of the weights that change")
    parser.add_argument("--json", type=Path)


def main(given: argparse.Namespace) -> None:
    ours = measure(1e9 * given.weights, given.density / 100)
    torch.cuda.empty_cache()
    model = make(1e9 * given.weights, given.density / 100)
    rows = [measure_full(model)]
    old, new, size = on_host(model.old), on_host(model.new), model.size
    del model
    others = (PulseCoo(), Basilica(3, workers=os.cpu_count() or 1))
    rows += [measure_other(codec, old, new) for codec in others]
    rows.append(
        row(
            "pulsesync context",
            ours.patch_bytes,
            ours.ms["diff + context encode + patch on the host"],
            ours.ms["context decode + apply with undo log"],
            ours.ms["of it the pause, context"],
        )
    )
    cells = [
        [one["codec"], f"{one['bytes']:,}", f"{2 * size / one['bytes']:.0f}"]
        + [f"{one[key]:,.1f}" for key in ("encode_ms", "decode_ms", "pause_ms")]
        for one in rows
    ]
    gpu = torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "none"
    print(f"\n{size:,} weights, {100 * ours.density:.2f} % changed, {gpu}, {os.cpu_count()} cores\n")
    print(table(["codec", "bytes", "× smaller", "encode ms", "decode and apply ms", "of it the pause ms"], cells))
    facts = {**provenance("torch", "triton", "numpy", "zstandard", "basilica-sdk"), "gpu": gpu}
    if given.json:
        given.json.write_text(json.dumps({"weights": size, "density": ours.density, "rows": rows, **facts}))
