"""Broadcast over real processes and gloo: whoever holds what, however it changed, whoever dies when."""

from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.integrations.torch import Broadcast
from tests.processes import Fleet, fleet, group

__all__ = ["fleet"]


def bits(model: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).numpy().copy() for name, t in model.items()}


def random_model(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    model = {}
    for n, dtype in enumerate([torch.bfloat16] * 6 + [torch.float32, torch.float16, torch.int64, torch.uint8]):
        shape = tuple(int(x) for x in rng.integers(0 if n == 3 else 1, 40, int(rng.integers(0, 4))))
        raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        model[f"layer.{n}.weight"] = torch.from_numpy(raw.copy()).view(dtype).reshape(shape)
    model["large.weight"] = torch.from_numpy((0.02 * rng.standard_normal((300, 700))).astype(np.float32)).bfloat16()
    return model


def change_(model: dict[str, torch.Tensor], rng: np.random.Generator, density: float) -> None:
    for tensor in model.values():
        flat = tensor.view(-1).view(torch.uint8)
        count = rng.binomial(flat.numel(), density)
        at = torch.from_numpy(rng.choice(flat.numel(), count, replace=False))
        flat[at] = torch.from_numpy(rng.integers(0, 256, count, np.uint8))


def every_push(rank: int, size: int, folder: str, seed: int, method: str) -> list[Any]:
    rng = np.random.default_rng(seed)
    model = random_model(rng)
    seen = []
    if rank:
        model = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    with group(folder, "one", rank, size):
        cast = Broadcast(timeout_s=8, method=method)
        for density in (0.0, 0.01, 0.0, 0.3, 0.001, 1.0):
            if rank == 0:
                change_(model, rng, density)
                report = cast.push(model)
            else:
                report = cast.pull_(model)
                cast.verify()
            seen.append((bits(model), report))
    return seen


@pytest.mark.parametrize("method", ["auto", "dense", "gap", "coded"])
@pytest.mark.parametrize(("size", "seed"), [(2, 0), (3, 1), (4, 2)])
def test_all_ranks_hold_the_same_bits_after_every_push(fleet: Fleet, size: int, seed: int, method: str) -> None:
    results = fleet.run(every_push, size, seed=seed, method=method)
    for steps in zip(*results, strict=True):
        (first, report), *others = steps
        for held, other in others:
            assert held.keys() == first.keys()
            assert all(np.array_equal(held[name], first[name]) for name in first)
            assert (other.version, other.digest) == (report.version, report.digest)
