"""The same version sent whole, in PULSE's published format, and by the best public codec: for `gpu --others`.

The other codecs run in host memory, on all cores where they can: their times begin and end there, so that neither the
copy to the host nor the write to the GPU counts against them. They verify nothing, or one hash for each tensor, and
write while they decode, so the whole decode is their pause. Each result is compared with the trainer's weights, bit for
bit, before its times are reported.
"""

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.harness.baselines import Baseline, Basilica, Bits, PulseCoo
from benchmarks.harness.device import DEVICE, Model, Pair, median_ms, name_of
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import timed

if TYPE_CHECKING:
    from benchmarks.gpu.gpu import Row


def measure(model: Pair, ours: "Row") -> dict[str, Any]:
    """Measure the others on this model, and print them next to what was measured of ours; return the figures."""
    size = model.size
    rows = [full(model)]
    old, new = on_host(model.old), on_host(model.new)
    codecs: list[Baseline] = [PulseCoo()]
    try:
        codecs.append(Basilica(3, workers=os.cpu_count() or 1))
    except ImportError as error:
        print(f"left out: {error}")
    rows += [other(codec, old, new) for codec in codecs]
    names = ("diff + context encode + patch on the host", "context decode + apply with undo log")
    times = [ours.ms[name] for name in (*names, "of it the pause, context")]
    rows.append(row("pulsesync context", ours.patch_bytes, *times))
    cells = [
        [one["codec"], f"{one['bytes']:,}", f"{2 * size / one['bytes']:.0f}"]
        + [f"{one[key]:,.1f}" for key in ("encode_ms", "decode_ms", "pause_ms")]
        for one in rows
    ]
    print(f"\n{size:,} weights, {100 * ours.density:.2f} % changed, {name_of()}, {os.cpu_count()} cores\n")
    print(table(["codec", "bytes", "× smaller", "encode ms", "decode and apply ms", "of it the pause ms"], cells))
    facts = {**provenance("torch", "triton", "basilica-sdk"), "gpu": name_of()}
    found = {"weights": size, "density": ours.density, "rows": rows, **facts}
    print(json_line({"bench": "gpu, others", **found}))
    return found


def on_host(tensors: Model) -> dict[str, Bits]:
    return {name: tensor.view(torch.int16).cpu().numpy().view(np.uint16).copy() for name, tensor in tensors.items()}


def full(model: Pair) -> dict[str, Any]:
    """Copy all weights to pinned host memory, and from there over the old ones."""
    source = max(model.new.values(), key=lambda tensor: tensor.numel())
    pinned = torch.empty(source.shape, dtype=source.dtype, pin_memory=DEVICE.type == "cuda")
    share = source.numel() / model.size  # one tensor is copied, and its time scaled: pinning 15 GB takes minutes
    encode_ms = median_ms(lambda: pinned.copy_(source)) / share
    target = torch.empty_like(source)
    decode_ms = median_ms(lambda: target.copy_(pinned)) / share
    assert torch.equal(target.view(torch.int16), source.view(torch.int16))
    return row("full weights", 2 * model.size, encode_ms, decode_ms, decode_ms)


def other(codec: Baseline, old: dict[str, Bits], new: dict[str, Bits]) -> dict[str, Any]:
    """Encode and decode once: at this size each takes seconds, and a warm-up would only save memory allocation."""
    patch, encode_s = timed(lambda: codec.encode(old, new))
    state = {name: bits.copy() for name, bits in old.items()}
    _, decode_s = timed(lambda: codec.apply_(state, patch))
    assert all(np.array_equal(state[name], bits) for name, bits in new.items()), codec.name
    return row(codec.name, len(patch), 1e3 * encode_s, 1e3 * decode_s, 1e3 * decode_s)


def row(name: str, size_bytes: int, encode_ms: float, decode_ms: float, pause_ms: float) -> dict[str, Any]:
    times = {"encode_ms": round(encode_ms, 1), "decode_ms": round(decode_ms, 1), "pause_ms": round(pause_ms, 1)}
    print(f"{name}: {size_bytes:,} bytes, {times}", flush=True)
    return {"codec": name, "bytes": size_bytes, **times}
