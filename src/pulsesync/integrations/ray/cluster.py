"""What this package needs of a Ray cluster: membership, named actors, and calls with a time limit."""

import time
from typing import Any

from pulsesync.core.extras import load
from pulsesync.errors import PulseError

NAMESPACE = "pulsesync"  # of all named actors of this package, so that any job of the cluster finds them
SLACK_S = 10.0  # time after an actor's own time limit until the actor counts as lost


def ray(part: str = "") -> Any:
    """Return the module ray, or a module in it. Raises: PulseError, which names the extra, if it is not installed."""
    return load(f"ray.{part}" if part else "ray", "rllib" if part.startswith("rllib") else "ray")


def check_joined() -> None:
    """Raises: PulseError, if this process is in no cluster: Ray would start a new one at the first call."""
    if not ray().is_initialized():
        raise PulseError("this process is not connected to a Ray cluster: call ray.init first")


def named_actor(cls: type, name: str, threads: int | None = None) -> Any:
    """Return the actor of a name, or start it on this node. It outlives the process that started it."""
    check_joined()
    affinity = ray("util.scheduling_strategies").NodeAffinitySchedulingStrategy
    here = affinity(ray().get_runtime_context().get_node_id(), soft=False)
    options: dict[str, Any] = {"max_concurrency": threads} if threads else {}
    options |= {"lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "scheduling_strategy": here}
    return ray().remote(cls).options(name=name, namespace=NAMESPACE, **options).remote()


def find_actor(name: str) -> Any:
    """Return the actor of a name, or None if there is none."""
    check_joined()
    try:
        return ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill_actor(name: str) -> None:
    """Kill the actor of a name, and wait until it has ended; if there is none, that is no error."""
    if (actor := find_actor(name)) is None:
        return
    ray().kill(actor)  # returns before the actor has ended
    errors, end = ray("exceptions"), time.monotonic() + SLACK_S
    while time.monotonic() < end:
        try:
            ray().get(actor.__ray_ready__.remote(), timeout=1.0)
        except errors.RayActorError:
            return
        except errors.GetTimeoutError:
            pass
