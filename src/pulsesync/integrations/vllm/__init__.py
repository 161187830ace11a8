"""vLLM follows a run: live parameters are updated in place, on all ranks or on none, and checked by digests.

    vllm serve MODEL --middleware pulsesync.integrations.vllm.Routes                 # then: pulse follow RUN --vllm URL
    vllm serve MODEL --weight-transfer-config '{"backend": "pulse"}'      # or vLLM's own routes, in development mode
    follower = pulsesync.integrations.vllm.attach(LLM(MODEL), "s3://bucket/run")     # or an offline LLM
    follower.update()

vLLM finds `plugin.register` by its entry point, in every process that it starts. See docs/integrations/vllm.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsesync.integrations.engine.server import ServerFollower as ServerFollower
    from pulsesync.integrations.engine.update import UpdateReport as UpdateReport
    from pulsesync.integrations.vllm.offline import OfflineFollower as OfflineFollower
    from pulsesync.integrations.vllm.offline import attach as attach
    from pulsesync.integrations.vllm.routes import Routes as Routes
    from pulsesync.integrations.vllm.server import VllmServer as VllmServer

_MODULES = {
    "OfflineFollower": "vllm.offline",
    "Routes": "vllm.routes",
    "ServerFollower": "engine.server",
    "UpdateReport": "engine.update",
    "VllmServer": "vllm.server",
    "attach": "vllm.offline",
}
__all__ = ["OfflineFollower", "Routes", "ServerFollower", "UpdateReport", "VllmServer", "attach"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"pulsesync.integrations.{_MODULES[name]}"), name)
