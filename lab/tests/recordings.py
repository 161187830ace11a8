"""A small recording by hand, of which every figure can be reckoned in the head."""

from dataclasses import replace
from typing import Any

from pulsesync_lab.study.recording import PatchBytes, Recording, RecordingHeader, Step, WatchedTensor

NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.experts.0.up_proj.weight",
    "model.layers.0.mlp.experts.1.up_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
)
SIZE = 4000


def header(**more: Any) -> RecordingHeader:
    """Four tensors of 1000 weights, 100 of each in the sample."""
    tensors = tuple(WatchedTensor(name, (10, 100), 1000, 100) for name in NAMES)
    facts = {"optimizer": "AdamW", "betas": [0.9, 0.999], "lr": 3e-6}
    return replace(RecordingHeader("BF16", tensors, (1, 2), ("F16", "F32"), facts), **more)


def step(number: int, *changed: int, **more: Any) -> Step:
    total = sum(changed)
    told: dict[str, Any] = {
        "again": total // 2 if number else 0,
        "same_way": total // 4 if number else 0,
        "up": total // 2,
        "units": {1: total - 2, 3: 2},
        "by_class": {110: total // 2, 115: total - total // 2},
        "weights_by_class": {110: 400, 115: 3600},
        "windows": {1: (1, 1, 1, 1), **({2: (2, 2, 2, 2)} if number else {})},
        "contrast": {"F16": (10, 10, 10, 10), "F32": (100, 100, 100, 99)},
        "gradients": (99, 99, 99, 99),
        "moved": {-4: 30, 0: 60, 2: 10},
        "hot": 0.1,
        "lr": min(number + 1, 3) * 1e-6,
        "seconds": 0.5,
        "sizes": {"gap": PatchBytes(200), "history": PatchBytes(100, 80), "dense": PatchBytes(8000)},
        "facts": {"reward": number / 10},
    }
    return Step(number, changed, **{**told, **more})


def made() -> Recording:
    """Sparsity 99, 96 and 98 %; expert 0 of layer 0 does not change in the last step."""
    return Recording(header(), (step(0, 10, 10, 10, 10), step(1, 40, 40, 40, 40), step(2, 20, 0, 40, 20)))
