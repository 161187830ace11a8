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

from pulsesync.core.version import __version__ as __version__
from pulsesync.errors import PulseError

if TYPE_CHECKING:
    from pulsesync import loco
    from pulsesync.format.signature import SigningKey
    from pulsesync.publish.publisher import Publisher, PublishReport
    from pulsesync.publish.sharded import ShardedPublisher
    from pulsesync.run.subscriber import Subscriber, SyncReport
    from pulsesync.run.warmup import warm_up
    from pulsesync.state.slices import Slice

__all__ = [
    "PublishReport",
    "Publisher",
    "PulseError",
    "ShardedPublisher",
    "SigningKey",
    "Slice",
    "Subscriber",
    "SyncReport",
    "loco",
    "warm_up",
]

_HOMES = {
    "PublishReport": "publish.publisher",
    "Publisher": "publish.publisher",
    "ShardedPublisher": "publish.sharded",
    "SigningKey": "format.signature",
    "Slice": "state.slices",
    "Subscriber": "run.subscriber",
    "SyncReport": "run.subscriber",
    "warm_up": "run.warmup",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "loco":
        return import_module("pulsesync.loco")
    if name not in _HOMES:
        raise AttributeError(f"module 'pulsesync' has no attribute {name!r}")
    return getattr(import_module(f"pulsesync.{_HOMES[name]}"), name)
