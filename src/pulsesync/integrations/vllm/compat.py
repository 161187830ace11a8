"""All calls of this adapter to vLLM, in one module, which handles the differences between vLLM's versions.

Tested with vLLM 0.32; the interfaces of 0.16 to 0.32 were read (docs/integrations/vllm.md). Only processes that run
vLLM import this module.
"""

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any

from pulsesync.errors import PulseError, StateError, StoreError
from pulsesync.group.collective import Team
from pulsesync.integrations.engine.adapter import MOVES_EXPERTS, EngineAdapter, gloo_team, no_checkpoint
from pulsesync.integrations.engine.update import CACHE_NOT_DROPPED
from pulsesync.integrations.runtime import EngineRank

# In a worker


class VllmEngine(EngineAdapter):
    """One rank of vLLM; `config` is the engine's VllmConfig."""

    def __init__(self, config: Any, model: Any) -> None:
        super().__init__(model)
        self.config = config

    def check(self) -> None:
        parallel = self.config.parallel_config
        if parallel.data_parallel_size > 1:
            raise StateError(
                f"this engine has {parallel.data_parallel_size} data-parallel replicas, but vLLM reports the answers "
                "of only one of them: start a server for each replica, and let each follow the run"
            )
        if getattr(parallel, "enable_eplb", False):
            raise StateError(MOVES_EXPERTS)

    def check_loader(self) -> None:
        has_lora = self.config.lora_config is not None
        if has_lora and not hasattr(import_module("vllm.lora.layers").BaseLayerWithLoRA, "load_weights"):
            raise StateError(
                "with --enable-lora, this version of vLLM cannot load weights again: use vLLM 0.28 or later"
            )

    def rank(self) -> EngineRank:
        parallel = self.config.parallel_config
        state = import_module("vllm.distributed.parallel_state")
        return EngineRank.vllm(
            state.get_tensor_model_parallel_rank(),
            parallel.tensor_parallel_size,
            dp=parallel.data_parallel_rank,
            dp_size=parallel.data_parallel_size,
            expert_parallel=parallel.enable_expert_parallel,
        )

    def hf_config(self) -> Any:
        return self.config.model_config.hf_config

    def is_quantised(self) -> bool:
        return self.config.model_config.quantization is not None

    def parameters(self) -> dict[str, Any]:
        """Return the live parameters by name, without the prefixes of the wrappers that `--enable-lora` adds."""
        return {name.replace(".base_layer.", "."): tensor.data for name, tensor in super().parameters().items()}

    def checkpoint(self) -> Iterator[tuple[str, Any]]:
        config = self.config
        loader = import_module("vllm.model_executor.model_loader").get_model_loader(config.load_config)
        if not hasattr(loader, "get_all_weights"):
            raise no_checkpoint(config.load_config.load_format)
        yield from loader.get_all_weights(config.model_config, self.model)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
        """Load tensors of a checkpoint with the model's own loader, layer by layer; other tensors do not change."""
        reload = import_module("vllm.model_executor.model_loader.reload")
        current = import_module("vllm.config").set_current_vllm_config
        finalize = getattr(reload, "finalize_layerwise_reload", None) or reload.finalize_layerwise_processing
        with current(self.config):
            reload.initialize_layerwise_reload(self.model)
            try:
                loaded: set[str] | None = self.model.load_weights(weights)
            finally:  # otherwise the layers would have no memory
                finalize(self.model, self.config.model_config)
        return loaded

    def refresh_packed(self) -> None:
        """Repack weights of which vLLM keeps a packed copy on a CPU.

        An output matrix that is tied to the embedding is an example: vLLM computes with a packed copy of it, and no
        method of loading weights renews that copy, so that log-probabilities would be those of old weights.
        """
        if not import_module("vllm.platforms").current_platform.is_cpu():
            return
        pack = import_module("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm
        for layer in [one for one in self.model.modules() if hasattr(one, "cpu_linear") and one.weight.numel()]:
            pack(layer, remove_weight=False)

    def derived(self) -> list[Any]:
        return [layer.cpu_linear for layer in self.model.modules() if hasattr(layer, "cpu_linear")]


def team_of(config: Any) -> Team:
    """Return the ranks of an engine, in a process group of their own. Every rank must call this at the same time."""
    parallel = config.parallel_config
    return gloo_team(parallel.tensor_parallel_size * parallel.pipeline_parallel_size)


# In the process that serves requests


async def drop_cache(engine: Any) -> None:
    """Drop all caches of old weights; requests in flight compute theirs again. Raises: PulseError, if that failed."""
    if await engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True) is False:
        raise PulseError(CACHE_NOT_DROPPED)
    for name in ("reset_mm_cache", "reset_encoder_cache"):  # of images; some versions lack the second
        if hasattr(engine, name):
            await getattr(engine, name)()


async def check_awake(engine: Any) -> None:
    """Refuse an engine that sleeps, because its memory is freed. Raises: StoreError, which is retryable."""
    if await engine.is_sleeping():
        raise StoreError("the engine is asleep: call wake_up, then update again", retryable=True)


async def set_version(engine: Any, version: str) -> None:
    if hasattr(engine, "update_weight_version"):
        await engine.update_weight_version(version)


async def get_version(engine: Any) -> str | None:
    return await engine.get_weight_version() if hasattr(engine, "get_weight_version") else None
