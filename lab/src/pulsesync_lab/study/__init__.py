"""How many weights change in a step, which, and why: measure it, explain it, predict it.

from pulsesync_lab.study import Recorder

with Recorder("study.jsonl").attach(optimizer, model):
    train()
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulsesync_lab.study.recorder import Recorder
    from pulsesync_lab.study.recording import Recording

__all__ = ["Recorder", "Recording"]

_HOMES = {"Recorder": "recorder", "Recording": "recording"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'pulsesync_lab.study' has no attribute {name!r}")
    return getattr(import_module(f"pulsesync_lab.study.{_HOMES[name]}"), name)
