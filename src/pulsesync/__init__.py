"""pulsesync: move model weights from trainers to inference workers, bit for bit, at a small fraction of the bytes.

    import pulsesync as pulse

    pub = pulse.Publisher("runs/one")           # trainer
    pub.publish(model, step=step)

    sub = pulse.Subscriber("runs/one")          # worker
    sub.sync(model)

    with pulse.loco.PulseLoCo(model, optimizer, sync_every=8, exchange=…):   # one of several trainers
        …

Importing this configures nothing and needs no torch; numba is imported at the first use, or by `warm_up`.
"""

from typing import TYPE_CHECKING, Any

from pulsesync.errors import PulseError

if TYPE_CHECKING:
    from pulsesync import loco
    from pulsesync.format.signature import SigningKey
    from pulsesync.publisher import Publisher, PublishReport
    from pulsesync.sharded import ShardedPublisher
    from pulsesync.slices import Slice
    from pulsesync.subscriber import Subscriber, SyncReport
    from pulsesync.warm import warm_up

__all__ = [
    "PublishReport", "Publisher", "PulseError", "ShardedPublisher", "SigningKey", "Slice", "Subscriber", "SyncReport",
    "loco", "warm_up",
]  # fmt: skip
__version__ = "0.1.0.dev0"

_HOMES = {
    "PublishReport": "publisher",
    "Publisher": "publisher",
    "ShardedPublisher": "sharded",
    "SigningKey": "format.signature",
    "Slice": "slices",
    "Subscriber": "subscriber",
    "SyncReport": "subscriber",
    "warm_up": "warm",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "loco":
        return import_module("pulsesync.loco")
    if name not in _HOMES:
        raise AttributeError(f"module 'pulsesync' has no attribute {name!r}")
    return getattr(import_module(f"pulsesync.{_HOMES[name]}"), name)
