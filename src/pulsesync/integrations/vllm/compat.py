"""Everything that this adapter asks of vLLM, in one place: what changes between its versions is absorbed here.

Run with vLLM 0.32; the interfaces of 0.16 to 0.32 were read (docs/integrations/vllm.md). Nothing here is imported by a
process that does not run vLLM.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from pulsesync.errors import PulseError, StateError, StoreError
from pulsesync.group.collective import Collective, SoloTeam, Team
from pulsesync.integrations.runtime import EngineRank, runtime_tensors

TIMEOUT_S = 1800.0  # for which a rank waits for the others: as long as the slowest may fetch


# In a worker


def check_engine(config: Any) -> None:
    """Refuse an engine whose weights could be wrong after an update that seems right.

    Raises:
        StateError: which setting it is, and what to do.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        raise StateError(
            f"this engine has {parallel.data_parallel_size} data-parallel replicas, and vLLM reports the answers of "
            "one of them alone: start a server for each replica, and let each follow the run"
        )
    if getattr(parallel, "enable_eplb", False):
        raise StateError(
            "this engine moves its experts while it runs (--enable-eplb), so the position of a weight is not known: "
            "start it without --enable-eplb"
        )


def check_loader(config: Any) -> None:
    """Refuse an engine whose loader would not find the layers of a checkpoint. Raises: StateError."""
    if config.lora_config is None:
        return
    if not hasattr(import_module("vllm.lora.layers").BaseLayerWithLoRA, "load_weights"):
        raise StateError("with --enable-lora, this version of vLLM cannot load weights again: use vLLM 0.28 or later")


def team_of(config: Any) -> Team:
    """The ranks of an engine, in a process group of their own. Every rank must call this at the same time."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size * parallel.pipeline_parallel_size == 1:
        return SoloTeam()
    return Collective(import_module("torch.distributed").new_group(backend="gloo"), TIMEOUT_S)


def rank_of(config: Any) -> EngineRank:
    """Which part of the model this rank has."""
    parallel = config.parallel_config
    state = import_module("vllm.distributed.parallel_state")
    return EngineRank.vllm(
        state.get_tensor_model_parallel_rank(),
        parallel.tensor_parallel_size,
        dp=parallel.data_parallel_rank,
        dp_size=parallel.data_parallel_size,
        expert_parallel=parallel.enable_expert_parallel,
    )


def hf_config(config: Any) -> Any:
    """The model's config.json, as transformers has it."""
    return config.model_config.hf_config


def is_quantised(config: Any) -> bool:
    return config.model_config.quantization is not None


def parameters(model: Any) -> dict[str, Any]:
    """The live parameters by name, without the marks of the wrapper that `--enable-lora` puts around layers."""
    return {name.replace(".base_layer.", "."): tensor.data for name, tensor in runtime_tensors(model).items()}


def checkpoint_of(config: Any, model: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of the checkpoint that the engine was started with, as vLLM's own loader reads them.

    Raises:
        PulseError: this engine was not started with a checkpoint that can be read again.
    """
    loader = import_module("vllm.model_executor.model_loader").get_model_loader(config.load_config)
    if not hasattr(loader, "get_all_weights"):
        raise PulseError(f"load_format={config.load_config.load_format!r} has no checkpoint that can be read again")
    yield from loader.get_all_weights(config.model_config, model)


def load_weights(config: Any, model: Any, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
    """Load tensors of a checkpoint through the model's own loader, layer by layer; others keep what they have.

    If it fails, some layers have new weights; all of them can be loaded again.
    """
    reload = import_module("vllm.model_executor.model_loader.reload")
    current = import_module("vllm.config").set_current_vllm_config
    finalize = getattr(reload, "finalize_layerwise_reload", None) or reload.finalize_layerwise_processing
    with current(config):
        reload.initialize_layerwise_reload(model)
        try:
            loaded: set[str] | None = model.load_weights(weights)
        finally:  # else the layers would stay without memory
            finalize(model, config.model_config)
    return loaded


def synchronize(model: Any) -> None:
    """Wait until the GPU of a model has done everything that it was given."""
    if (device := device_of(model)) is not None:
        import torch

        torch.cuda.synchronize(device)


def device_of(model: Any) -> Any:
    """The GPU that a model is on, None if it is on none."""
    return next((tensor.device for tensor in model.parameters() if tensor.device.type == "cuda"), None)


def refresh_packed(model: Any) -> int:
    """Pack again what vLLM packed on a CPU beside weights that it keeps; return how many layers.

    An output matrix that is tied to the embedding is one: vLLM computes with a packed copy of it, and no way of loading
    weights makes that copy anew, so that log-probabilities would be those of old weights.
    """
    if not import_module("vllm.platforms").current_platform.is_cpu():
        return 0
    pack = import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear") and layer.weight.numel()]
    for layer in layers:
        pack(layer, remove_weight=False)
    return len(layers)


def derived(model: Any) -> list[Any]:
    """What layers keep beside their parameters and compute with: packed weights, each an object of its own."""
    return [layer.cpu_linear for layer in model.modules() if hasattr(layer, "cpu_linear")]


# In the process that serves requests


async def pause(engine: Any) -> None:
    """Stop generating, and keep the requests in flight."""
    await engine.pause_generation(mode="keep", clear_cache=False)


async def drop_cache(engine: Any) -> None:
    """Drop everything that old weights have computed; requests in flight compute theirs again.

    Raises:
        PulseError: the engine did not do so.
    """
    if await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is False:
        raise PulseError("the engine could not drop its KV cache, which was computed with other weights")
    for name in ("reset_mm_cache", "reset_encoder_cache"):  # those of images; the second is not in all versions
        if hasattr(engine, name):
            await getattr(engine, name)()


async def check_awake(engine: Any) -> None:
    """Refuse an engine that sleeps: its memory is not there. Raises: StoreError, which may pass."""
    if await engine.is_sleeping():
        raise StoreError("the engine is asleep: call wake_up, then update again", retryable=True)


async def set_version(engine: Any, version: str) -> None:
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(version)


async def get_version(engine: Any) -> str | None:
    return await engine.get_weight_version() if hasattr(engine, "get_weight_version") else None
