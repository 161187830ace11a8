"""What this package asks of a Ray cluster: that it is there, named actors, and answers within a time."""

import time
from importlib import import_module
from typing import Any

from pulsesync.errors import PulseError

NAMESPACE = "pulsesync"  # of all named actors here: any job of the cluster finds them
SLACK_S = 10.0  # beyond what an actor was told to wait, until it is taken to be lost


def ray(part: str = "") -> Any:
    """Ray, or a module of it.

    Raises:
        PulseError: it is not installed, and by what name it would be.
    """
    try:
        whole = import_module("ray")
        return import_module(f"ray.{part}") if part else whole
    except ModuleNotFoundError as e:
        extra = "rllib" if part.startswith("rllib") else "ray"
        raise PulseError(f"{e.name} is not installed: pip install 'pulsesync[{extra}]'") from e


def check_joined() -> None:
    """Raises: PulseError, if this process is in no cluster: Ray would begin one of its own at the first call."""
    if not ray().is_initialized():
        raise PulseError("this process is in no Ray cluster: call ray.init first")


def named_actor(cls: type, name: str, threads: int | None = None) -> Any:
    """The actor of a name: found, or started on this node. It outlives whoever started it, until it is killed."""
    check_joined()
    affinity = ray("util.scheduling_strategies").NodeAffinitySchedulingStrategy
    options: dict[str, Any] = {"max_concurrency": threads} if threads else {}
    return (
        ray()
        .remote(cls)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            scheduling_strategy=affinity(ray().get_runtime_context().get_node_id(), soft=False),
            **options,
        )
        .remote()
    )


def find_actor(name: str) -> Any:
    """The actor of a name, or None if there is none."""
    check_joined()
    try:
        return ray().get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def kill_actor(name: str) -> None:
    """End the actor of a name, and wait until it answers no more; none is no error."""
    if (actor := find_actor(name)) is None:
        return
    ray().kill(actor)  # which returns before it is done
    errors, end = ray("exceptions"), time.monotonic() + SLACK_S
    while time.monotonic() < end:
        try:
            ray().get(actor.__ray_ready__.remote(), timeout=1.0)
        except errors.RayActorError:
            return
        except errors.GetTimeoutError:
            pass
