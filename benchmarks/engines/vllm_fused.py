"""How long does an update of an engine's fused parameters take on a GPU: to prepare, and in the pause?

    python -m benchmarks vllm_fused [--layers 28]

The parameters are those that a rank of vLLM has of Qwen2.5-7B (fused qkv and gate_up, padded vocabulary), without vLLM:
the adapter's follower writes them, as it does in a worker. Each version changes about 1 % of the weights by one
unit of their last bit, small ones more often, as Adam does. The run is in host memory, so that no link is measured.
After each update every parameter is compared with what was published.
"""

import argparse
import statistics
import time
from typing import Any

import torch

from benchmarks.harness.device import SPREAD, chances, name_of, need_gpu, train_
from benchmarks.harness.report import json_line, provenance, table
from pulsesync import Publisher
from pulsesync.core.location import ParsedLocation
from pulsesync.integrations.engine.adapter import EngineAdapter
from pulsesync.integrations.engine.follower import EngineFollower, RunOptions
from pulsesync.integrations.runtime import EngineRank, ModelShape, fused
from pulsesync.store import open_store

QUICK = ("--layers", "2", "--versions", "4")
QWEN = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
RUN = "memory://bench-vllm-gpu"


class FusedParameters(torch.nn.Module):
    """The parameters of an engine, and the checkpoint's tensors as copies of them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tensors: dict[str, torch.Tensor] = {}
        self.pieces = list(fused(shape, EngineRank()))
        for one in self.pieces:
            self.tensors[one.name] = torch.randn(one.shape, device="cuda", dtype=torch.bfloat16) * SPREAD

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return ((name, torch.nn.Parameter(tensor, requires_grad=False)) for name, tensor in self.tensors.items())

    def parameters(self, recurse: bool = True) -> Any:
        return (tensor for _, tensor in self.named_parameters())

    def checkpoint(self) -> dict[str, torch.Tensor]:
        return {piece.name: self.tensors[one.name][piece.at].clone() for one in self.pieces for piece in one.pieces}

    def equals(self, checkpoint: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(self.tensors[one.name][piece.at].view(torch.int16), checkpoint[piece.name].view(torch.int16))
            for one in self.pieces
            for piece in one.pieces
        )


class FusedEngine(EngineAdapter):
    """The interface that the follower requires of an engine, for the parameters above."""

    def __init__(self, model: FusedParameters, config: dict[str, Any]) -> None:
        super().__init__(model)
        self._config = config

    def check(self) -> None:
        pass

    def rank(self) -> EngineRank:
        return EngineRank()

    def hf_config(self) -> Any:
        return self._config

    def is_quantised(self) -> bool:
        return False

    def checkpoint(self) -> Any:
        return iter(())

    def load_weights(self, weights: Any) -> None:
        raise NotImplementedError


def update(follower: EngineFollower, version: int) -> dict[str, float]:
    torch.cuda.synchronize()
    began = time.perf_counter()
    follower.prepare(RunOptions(ParsedLocation.parse(RUN)), version)
    while (status := follower.status())["update"] != "ready":
        time.sleep(0.0005)
    assert status["failure"] is None, status
    prepared = time.perf_counter()
    report = follower.commit()
    done = time.perf_counter()
    assert report["mode"] == "in place", report
    return {"prepare_s": prepared - began, "pause_s": done - prepared}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--versions", type=int, default=6)


def main(given: argparse.Namespace) -> None:
    need_gpu(7.6e9)
    config = {**QWEN, "num_hidden_layers": given.layers}
    engine = FusedParameters(ModelShape.from_config(config))
    weights = engine.checkpoint()
    size = sum(tensor.numel() for tensor in weights.values())
    print(f"{size / 1e9:.2f} B weights in {len(engine.tensors)} parameters, {len(weights)} tensors of the checkpoint")
    publisher = Publisher(open_store(RUN), codec="auto", link=1e9)
    began = time.perf_counter()
    publisher.publish(weights, step=0)
    print(f"published version 0 in {time.perf_counter() - began:.1f} s", flush=True)
    follower = EngineFollower(FusedEngine(engine, config))
    update(follower, 0)
    rows, chance = [], chances(0.01)
    for version in range(1, given.versions + 1):
        train_(weights, chance)
        report = publisher.publish(weights, step=version)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        row = update(follower, version)
        row["memory_bytes"] = torch.cuda.max_memory_allocated() - held
        assert engine.equals(weights), "the engine has other weights than were published"
        rows.append({**row, "version": version, "changed": report.changed / size, "bytes": report.payload_bytes})
        print(rows[-1], flush=True)
    publisher.close()
    names = ("prepare_s", "pause_s", "bytes", "memory_bytes")
    found = {key: statistics.median(row[key] for row in rows[2:]) for key in names}  # the first ones compile kernels
    cells = [
        ["weights", f"{size / 1e9:.2f} B"],
        ["prepared in", f"{found['prepare_s'] * 1e3:.0f} ms"],
        ["pause", f"{found['pause_s'] * 1e3:.0f} ms"],
        ["bytes of a version", f"{found['bytes'] / 1e6:.1f} MB"],
        ["memory on the GPU, for the update", f"{found['memory_bytes'] / 1e9:.1f} GB"],
    ]
    print("\n" + table(["", "median"], cells))
    about = provenance("torch", "triton")
    print(json_line({"bench": "vllm_fused", **about, "device": name_of(), "weights": size, "rows": rows}))
