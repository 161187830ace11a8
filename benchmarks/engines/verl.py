"""What does a sync of verl's rollouts cost through a run: bytes, and seconds in which no rollout generates?

    .venv-verl/bin/python -m benchmarks verl                 # after make test-verl; three minutes on 2 cores
    .venv-verl/bin/python -m benchmarks verl --tensors 4     # smaller

verl's own manager, worker groups and workers on a real Ray cluster of one machine, without a GPU: trainers that share a
model by FSDP2 over gloo, and rollouts that keep a copy of the weights where vLLM would load them. The updates resemble
those of RL (`AdamUpdates`, after 12 steps). The run is a folder. A pause is the whole of `update_weights` of verl's
manager, which aborts all requests before and resumes them after. Results are printed only if every rollout had the
trainers' weights after each step, bit for bit.

verl's own transfers need GPUs, so only the bytes that they would send according to their source code are given: `nccl`
sends every weight, `delta_sharded` an int32 position and a BF16 value of each that changed.
"""

import argparse
import hashlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import RolloutConfig

from benchmarks.harness.report import json_line, provenance, table
from pulsesync import warm_up
from pulsesync.testing import AdamUpdates
from tests.integrations.verl.actors import RolloutWorker, ServerlessReplica, ShardedEngine, TrainerWorker

QUICK = ("--tensors", "2", "--steps", "3")
SHAPE = (2048, 1024)  # of every tensor
WARM_UP = 12  # steps


def load(folder: Path, step: int) -> dict[str, torch.Tensor]:
    bits = np.load(folder / f"{step}.npy", mmap_mode="c")
    return {f"layer{n}.weight": torch.from_numpy(bits[n]).view(torch.bfloat16) for n in range(len(bits))}


def digest(weights: dict[str, torch.Tensor]) -> str:
    hashed = hashlib.sha256()
    for name in sorted(weights):
        hashed.update(name.encode() + weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class RecordedTrainer(TrainerWorker):
    """A trainer whose weights after each step are in files."""

    def __init__(self, checkpoint_engine: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        super().__init__(checkpoint_engine)

    def make_engine(self, ahead: int) -> ShardedEngine:
        first = load(self.folder, 0)
        shapes = {name: (one.dtype, tuple(one.shape)) for name, one in first.items()}
        return ShardedEngine(shapes, lambda step: load(self.folder, step))


class HashingRollout(RolloutWorker):
    """A rollout that reports the hash of its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digest(self) -> str:
        return digest(self.server_adapter.received)


def record_steps(folder: Path, tensors: int, steps: int) -> None:
    updates = AdamUpdates({f"{n}": SHAPE for n in range(tensors)})
    for _ in range(WARM_UP):
        updates.step()
    for step in range(steps + 1):
        np.save(folder / f"{step}.npy", np.stack(list(updates.step().values())))


def measure(folder: Path, trainers: int, rollouts: int, steps: int) -> list[dict[str, float]]:
    config = {
        "_target_": "verl.workers.config.CheckpointEngineConfig",
        "backend": "pulse",
        "custom_backend_module": "pulsesync.integrations.verl",
        "engine_kwargs": {"pulse": {"location": str(folder / "run")}},
    }
    engine = omega_conf_to_dataclass(OmegaConf.create(config))
    rollout_config = RolloutConfig(name="vllm", checkpoint_engine=engine)

    def start(count: int, *given: Any) -> Any:
        pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
        return RayWorkerGroup(pool, RayClassWithInitArgs(*given), use_gpu=False)

    actors = start(trainers, ray.remote(RecordedTrainer), config, folder)
    servers = start(rollouts, ray.remote(HashingRollout), rollout_config)
    replicas = [ServerlessReplica(n, rollout_config, None, gpus_per_node=1) for n in range(rollouts)]
    for replica, worker in zip(replicas, servers.workers, strict=True):
        replica.workers = [worker]
    manager = CheckpointEngineManager(engine, actors, replicas)
    out = []
    for step in range(steps + 1):
        actors.train(step)
        began = time.perf_counter()
        metrics = manager.update_weights(global_steps=step)
        metrics["pause_s"] = time.perf_counter() - began
        assert set(servers.digest()) == {digest(load(folder, step))}, (
            f"step {step}: a rollout's weights differ from the trainers'"
        )
        out.append(metrics)
    return out


def report(measured: list[dict[str, float]], size: int) -> dict[str, Any]:
    first, patches = measured[0], measured[2:]  # the second sync is the first patch: every process loads its kernels

    def middle(name: str) -> float:
        return statistics.median(one[name] for one in patches)

    changed, payload = middle("checkpoint_engine/changed_elems"), middle("checkpoint_engine/payload_mbytes") * (1 << 20)
    return {
        "weights": size,
        "full_bytes": 2 * size,
        "anchor_bytes": int(first["checkpoint_engine/payload_mbytes"] * (1 << 20)),
        "first_pause_s": first["pause_s"],
        "changed_ratio": middle("checkpoint_engine/changed_ratio"),
        "patch_bytes": int(payload),
        "delta_sharded_bytes": int(6 * changed),
        "pause_s": sorted(one["pause_s"] for one in patches),
        "pause_p50_s": middle("pause_s"),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tensors", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=2)


def main(given: argparse.Namespace) -> None:
    warm_up()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record_steps(folder, given.tensors, given.steps)
        ray.init("local", num_cpus=16, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
        try:
            measured = measure(folder, given.trainers, given.rollouts, given.steps)
        finally:
            ray.shutdown()
    found = report(measured, given.tensors * SHAPE[0] * SHAPE[1])
    rows = [
        ["nccl, by its source", f"{found['full_bytes']:,}", "not run"],
        ["delta_sharded, by its source", f"{found['delta_sharded_bytes']:,}", "not run"],
        ["pulse, a patch", f"{found['patch_bytes']:,}", f"{found['pause_p50_s']:.2f}"],
        ["pulse, the first sync", f"{found['anchor_bytes']:,}", f"{found['first_pause_s']:.2f}"],
    ]
    print(table(["transfer", "bytes a sync", "pause, s"], rows))
    print(json_line({**vars(given), **found, **provenance("verl", "ray", "torch")}))
