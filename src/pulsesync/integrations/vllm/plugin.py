"""What vLLM calls in every process that it starts, by the entry point `pulse` of the group `vllm.general_plugins`.

It registers the weight-transfer backend "pulse", and adds a method to workers, `pulse_call`, which `collective_rpc`
calls by its name. So an engine can follow a run without special options.

Nothing else of pulsesync is imported before a worker is called: processes start as quickly as without it, and on a CPU
vLLM 0.32 cannot start a worker in a process that has imported numba.
"""

import inspect
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pulsesync.core.environment import read_switch

if TYPE_CHECKING:
    from pulsesync.integrations.engine.follower import EngineFollower, EngineLimits

BACKEND = "pulse"
PLAIN_WEIGHTS = "PULSE_VLLM_PLAIN_WEIGHTS"  # 1: on a CPU, keep linear weights as they are loaded, and write in place
PREFIX = "PULSE_VLLM"  # of PULSE_VLLM_RUNS, PULSE_VLLM_TRUST, PULSE_VLLM_CACHE, …: see EngineLimits


def register() -> None:
    """Register this adapter in vLLM; it may be called again. Raises: ValueError, as `read_switch`."""
    try:
        factory = import_module("vllm.distributed.weight_transfer.factory").WeightTransferEngineFactory
    except ModuleNotFoundError:  # before vLLM 0.16
        factory = None
    # Since vLLM 0.25, engines get the configuration and the model.
    takes_config = factory is not None and "vllm_config" in inspect.signature(factory.create_engine).parameters
    if takes_config and BACKEND not in factory._registry:
        factory.register_engine(BACKEND, "pulsesync.integrations.vllm.backend", "PulseWeightTransferEngine")
    worker = import_module("vllm.v1.worker.worker_base").WorkerBase
    worker.pulse_call = pulse_call
    if read_switch(PLAIN_WEIGHTS):
        operations: Any = import_module("vllm._custom_ops")
        operations._supports_onednn = False  # with it, linear layers on a CPU would keep only packed weights


def pulse_call(worker: Any, message: str) -> dict[str, Any]:
    """Have a worker answer a message, which is the JSON of what `EngineFollower.call` takes."""
    return follower_of(worker).call(json.loads(message))


def follower_of(worker: Any) -> "EngineFollower":
    """Return the follower of a worker: that of its weight-transfer engine, if that is ours, or one of its own."""
    from pulsesync.integrations.engine.follower import EngineFollower
    from pulsesync.integrations.vllm.compat import VllmEngine

    engine = getattr(worker, "weight_transfer_engine", None)
    follower = getattr(engine, "follower", None) or getattr(worker, "pulse_follower", None)
    if not isinstance(follower, EngineFollower):
        follower = EngineFollower(VllmEngine(worker.vllm_config, worker.model_runner.get_model()), read_limits())
        worker.pulse_follower = follower
    return follower


def read_limits() -> "EngineLimits":
    """Read the limits from the environment of this process. Raises: ValueError, as `EngineLimits.read`."""
    from pulsesync.integrations.engine.follower import EngineLimits

    return EngineLimits.read(PREFIX)
