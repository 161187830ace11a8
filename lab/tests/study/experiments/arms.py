"""Arms small enough for tests: a policy of some thousand weights, two prompts, a few steps."""

from typing import Any

from pulsesync_lab.demo.policy import PolicyShape
from pulsesync_lab.study.experiments.arm import Arm

TINY = PolicyShape(16, 1, 2)


def tiny(name: str = "an arm", **changes: Any) -> Arm:
    """Learns from what it is shown, so that there are gradients although a policy so small gets nothing right."""
    settings: dict[str, Any] = {
        "algorithm": "sft",
        "shape": TINY,
        "prompts": 2,
        "group": 4,
        "steps": 3,
        "lr": 1e-3,
        "warm_up": 0,
        "pretraining": 2,
    }
    return Arm(name, **settings | changes)
