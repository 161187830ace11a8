"""Trainers and rollouts of the tests: verl's own worker classes, with weights that are known for each step.

Not in the test module: every actor is a process that imports the module of its class, and this one does without pytest.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import BaseRollout, RolloutReplica

from pulsesync.core.types import Bits
from pulsesync.testing import mutate, random_bits
from tests.publishers import kept_bytes

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of each tensor
# The first three have more weights than those that share a tile, so that they go to different trainers.
SHAPES: Shapes = {
    "embed.weight": (torch.bfloat16, (520, 256)),
    "up.weight": (torch.bfloat16, (300, 256)),
    "down.weight": (torch.float32, (256, 300)),  # FP32 master weights, published as BF16
    "gate.weight": (torch.float32, (8, 256)),  # left in FP32
    "norm.weight": (torch.bfloat16, (256,)),
}
CAST = {"gate.*": "", "*": "BF16"}
BITS: dict[torch.dtype, type[np.uint16] | type[np.uint32]] = {torch.bfloat16: np.uint16, torch.float32: np.uint32}


def weights_at(step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The trainers' weights after a step: of every kind, NaNs with payloads and both zeros among them."""
    rng = np.random.default_rng(seed)
    bits: dict[str, Bits] = {name: random_bits(rng, BITS[dtype], shape) for name, (dtype, shape) in SHAPES.items()}
    for _ in range(step):
        bits = {name: mutate(rng, one, 0.01) for name, one in bits.items()}
    return {name: torch.from_numpy(one.copy()).view(SHAPES[name][0]) for name, one in bits.items()}


def published_at(step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The same as rollouts must receive them."""
    weights = weights_at(step, seed)
    return weights | {"down.weight": weights["down.weight"].to(torch.bfloat16)}


def described(weights: dict[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Weights in a form that can be compared bit for bit."""
    return {
        name: (str(one.dtype), tuple(one.shape), one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in weights.items()
    }


def damage(files: set[Path]) -> None:
    """Flip a bit in the middle of each of these files: the record of a version, and its parts."""
    assert any(path.parent.name == "manifests" for path in files)
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)


class ShardedEngine:
    """A model sharded by FSDP2 on CPUs, exported by verl's FSDP engine, which verl does not make without a GPU.

    Args:
        shapes: Dtype and shape of each tensor.
        weights: The complete tensors after a step.
    """

    # What FSDPEngine.get_per_tensor_param looks at: no adapters, nothing offloaded, no quantisation.
    model_config = SimpleNamespace(lora={}, hf_config=SimpleNamespace(model_type="llama"))
    _uses_fsdp2_cpu_offload_policy = _is_offload_param = _qat_enabled = False

    def __init__(self, shapes: Shapes, weights: Callable[[int], dict[str, torch.Tensor]]) -> None:
        self.weights, self.skips, self.dies_at = weights, "", ""
        self.module = nn.Module()
        for name, (dtype, shape) in shapes.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), False)
            self.module.add_module(name.removesuffix(".weight"), layer)
        self.mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        fully_shard(self.module, mesh=self.mesh)
        # It asks for the GPU to gather on, and for the memory of it.
        transformer_impl.get_device_id = lambda: "cpu"
        transformer_impl.log_gpu_memory_usage = lambda *_, **__: None

    def train(self, step: int) -> None:
        for name, full in self.weights(step).items():
            live = self.module.get_parameter(name)
            assert isinstance(live, DTensor)
            live.to_local().copy_(distribute_tensor(full, self.mesh, live.placements).to_local())

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        exported, adapters = transformer_impl.FSDPEngine.get_per_tensor_param(self)
        assert adapters is None
        return self._passed_on(exported), None

    def _passed_on(self, exported: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in exported:
            if name == self.dies_at:
                os._exit(1)
            if name != self.skips:
                yield name, tensor


class TrainerWorker(Worker):
    """A trainer whose checkpoint engine is made and driven by verl's code: `ActorRolloutRefWorker` needs a GPU.

    Args:
        checkpoint_engine: As verl's configuration has it.
        ahead: A step has the weights of this many steps later, so that its weights differ from those before a crash.
    """

    def __init__(self, checkpoint_engine: dict[str, Any], ahead: int = 0) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=60, backend="cpu:gloo")
        self.config = OmegaConf.create({"rollout": {"checkpoint_engine": checkpoint_engine}})
        self.actor = SimpleNamespace(engine=self.make_engine(ahead))
        # What follows is step 4 of ActorRolloutRefWorker.init_model.
        config = omega_conf_to_dataclass(self.config.rollout.checkpoint_engine)
        import_external_libs(config.custom_backend_module or None)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=(torch.distributed.get_rank() == 0),
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )

    def make_engine(self, ahead: int) -> ShardedEngine:
        return ShardedEngine(SHAPES, lambda step: weights_at(step + ahead))

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, step: int) -> None:
        self.actor.engine.train(step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def skip_on_rank_1(self, name: str) -> None:
        """From now on rank 1 is given all tensors but this one; "": all of them."""
        self.actor.engine.skips = name if self.rank == 1 else ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def die_on_rank_1(self, name: str) -> None:
        """In the next sync the process of rank 1 ends when it is asked for this tensor."""
        self.actor.engine.dies_at = name if self.rank == 1 else ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def kept_bytes(self) -> int:
        """What this rank keeps of the last version."""
        return kept_bytes(self.checkpoint_engine._publisher)


class KeepingRollout(BaseRollout):
    """What stands between verl and an inference engine; this one keeps what it is given."""

    def __init__(self, config: Any, model_config: Any) -> None:
        super().__init__(config, model_config, device_mesh=None)
        self.received: dict[str, torch.Tensor] = {}
        self.step: int | None = None

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        assert kwargs == {"wire_format": "named_tensors"}
        received = {name: tensor.clone() async for name, tensor in weights}
        self.received, self.step = received, global_steps


class RolloutWorker(CheckpointEngineWorker):
    def __init__(self, rollout_config: Any, model_config: Any = None) -> None:
        super().__init__(rollout_config, model_config, KeepingRollout(rollout_config, model_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self) -> tuple[int | None, dict[str, Any]]:
        return self.server_adapter.step, described(self.server_adapter.received)


class ServerlessReplica(RolloutReplica):
    """A replica of workers without an inference server."""

    async def launch_servers(self) -> None: ...
