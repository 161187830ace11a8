"""A rank of vLLM without an engine around it: vLLM's own model classes load checkpoints, and the map is checked.

    python -m tests.integrations.vllm.family_rank FOLDER RANK WORLD

FOLDER has a folder for each model, with its checkpoint and, in `next`, another one; FOLDER/jobs.json says which to load
and whether experts are spread. What was found is written to FOLDER/WORLD-RANK.json, by name of the job.
"""

import json
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pulsesync.errors import StateError
from pulsesync.integrations.runtime import EngineRank, ModelShape, check_loaded, place, runtime_tensors
from pulsesync.state.sharding import Placed

Tensors = Mapping[str, Any]


def bits(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().view(torch.int32)


def write_(placed: Mapping[str, Placed], checkpoint: Tensors) -> None:
    """Write what a rank has of a checkpoint through the map, as a sync does."""
    import torch

    with torch.no_grad():
        for name, one in placed.items():
            whole = checkpoint[name].reshape(one.shape[0], -1)
            part = whole[slice(*(one.rows or (None,))), slice(*(one.columns or (None,)))]
            one.tensor.copy_(part.reshape(one.tensor.shape))


def keep_weights_as_loaded() -> None:
    """Have linear layers keep their weights, which oneDNN would pack away, and save ten seconds for each class."""
    operators: Any = import_module("vllm._custom_ops")
    operators._supports_onednn = False
    # vLLM looks at each model class in a process of its own, to keep CUDA out of this one.
    registry: Any = import_module("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = lambda function: function()


def attention(folder: Path) -> str | None:
    """The backend to ask for: vLLM's for latent attention on CPUs with AMX takes no FP32, and would be chosen there."""
    return "CPU_MLA" if "kv_lora_rank" in json.loads((folder / "config.json").read_text()) else None


class Loader:
    """Builds vLLM's model of a folder and has it load the folder's weights, before kernels repack them.

    The first model must have experts: with it vLLM makes the groups of its ranks, and that of experts only then.
    """

    def __init__(self, rank: int, world: int, meeting: Path) -> None:
        keep_weights_as_loaded()
        self.rank, self.world, self.meeting = rank, world, meeting
        self.met = False

    def load(self, folder: Path, spread: bool, latent: bool) -> tuple[Any, Any]:
        """The model and its configuration; `latent` also derives what latent attention multiplies with."""
        import torch

        config = (
            import_module("vllm.engine.arg_utils")
            .EngineArgs(
                model=str(folder),
                skip_tokenizer_init=True,
                dtype="float32",
                attention_backend=attention(folder),
                enforce_eager=True,
                max_model_len=128,
                tensor_parallel_size=self.world,
                enable_expert_parallel=spread,
                distributed_executor_backend="mp" if self.world > 1 else None,
            )
            .create_engine_config()
        )
        with import_module("vllm.config").set_current_vllm_config(config):
            if not self.met:
                self._meet()
            precise = import_module("vllm.utils.torch_utils").set_default_torch_dtype(torch.float32)
            with precise, torch.device("cpu"):
                model = import_module("vllm.model_executor.model_loader.utils").initialize_model(config)
                loader = import_module("vllm.model_executor.model_loader").get_model_loader(config.load_config)
                loader.load_weights(model, config.model_config)
            if latent:
                for module in model.modules():
                    if type(module).__name__ == "MLAAttention":
                        module.process_weights_after_loading(torch.float32)
        return model, config

    def _meet(self) -> None:
        state = import_module("vllm.distributed.parallel_state")
        state.init_distributed_environment(self.world, self.rank, f"file://{self.meeting}", self.rank, "gloo")
        state.ensure_model_parallel_initialized(self.world, 1)
        self.met = True


def held(shape: ModelShape, rank: EngineRank, model: Any, checkpoint: Tensors) -> str:
    """Empty, or why the model is not found to hold this checkpoint where the map says."""
    try:
        check_loaded(place(shape, rank, runtime_tensors(model)), checkpoint)
    except StateError as refused:
        return str(refused)
    return ""


def look(loader: Loader, folder: Path, spread: bool) -> dict[str, Any]:
    """Everything that the tests ask of a model."""
    import torch

    load_file = import_module("safetensors.torch").load_file
    now, then = (load_file(at / "model.safetensors") for at in (folder, folder / "next"))
    shape = ModelShape.from_config(json.loads((folder / "config.json").read_text()))
    rank = EngineRank.vllm(loader.rank, loader.world, expert_parallel=spread)
    model, config = loader.load(folder, spread, latent=True)
    found: dict[str, Any] = {"class": type(model).__name__, "loaded": held(shape, rank, model, now)}
    if not found["loaded"]:
        placed = place(shape, rank, runtime_tensors(model))
        found["elsewhere"] = sorted(now.keys() - placed.keys())
        write_(placed, then)
        other, _ = loader.load(folder / "next", spread, latent=True)
        mine, others = runtime_tensors(model), runtime_tensors(other)
        assert mine.keys() == others.keys()
        found["differ"] = [name for name in mine if not torch.equal(bits(mine[name]), bits(others[name]))]
        found["derived"] = sum(name.rpartition(".")[2].startswith("W_") for name in mine)
        with import_module("vllm.config").set_current_vllm_config(config):
            utils = import_module("vllm.model_executor.model_loader.utils")
            utils.process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        found["processed"] = held(shape, rank, model, then)
    return found


def main(folder: Path, rank: int, world: int) -> None:
    loader = Loader(rank, world, folder / f"meeting-{world}")
    found = {}
    for name, family, spread in json.loads((folder / "jobs.json").read_text())[str(world)]:
        found[name] = look(loader, folder / family, spread)
        print(name, found[name], flush=True)
    (folder / f"{world}-{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # vLLM's groups and threads are not taken down one by one


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
