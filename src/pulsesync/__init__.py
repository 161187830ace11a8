"""pulsesync: move model weights from trainers to inference workers, bit for bit, at a small fraction of the bytes.

    import pulsesync as pulse

    pub = pulse.Publisher("runs/one")           # trainer
    pub.publish(model, step=step)

    sub = pulse.Subscriber("runs/one")          # worker
    sub.sync(model)

    with pulse.loco.PulseLoCo(model, optimizer, sync_every=8, exchange=…):   # one of several trainers
        …

Public are the names in `__all__` here, and those in the `__all__` of the modules that docs/public_names.txt lists.
Everything else is internal and may change in any version.

Importing this configures nothing and needs neither numpy nor torch: a name is imported at its first use, and numba at
the first use of a kernel, or by `warm_up`.
"""

from typing import TYPE_CHECKING, Any

from pulsesync.core.version import __version__ as __version__
from pulsesync.errors import (
    AnotherPublisherError,
    BaseMismatchError,
    ChainError,
    ChecksumError,
    ClosedError,
    ConflictError,
    FormatError,
    GroupError,
    LimitError,
    MissingBucketError,
    MissingLinkError,
    NotFoundError,
    NothingPublishedError,
    PointerMovedError,
    PulseError,
    RoundError,
    RunChangedError,
    RunForkedError,
    RunReplacedError,
    RunRolledBackError,
    SignatureError,
    StaleWeightsError,
    StateError,
    StoreError,
    UnsupportedError,
    VerificationError,
)

if TYPE_CHECKING:
    from pulsesync import loco
    from pulsesync.core import events
    from pulsesync.core.events import listen
    from pulsesync.core.progress import show_progress
    from pulsesync.format.pointer import Pointer
    from pulsesync.format.signature import Delegation, SigningKey
    from pulsesync.group.broadcast import Broadcast, BroadcastReport
    from pulsesync.group.collective import Collective
    from pulsesync.maintain.point import move_pointer
    from pulsesync.publish.pending import PublishReport
    from pulsesync.publish.publisher import Publisher
    from pulsesync.publish.sharded import ShardedPublisher
    from pulsesync.publish.warmup import warm_up
    from pulsesync.run.fleet import FleetStatus, WorkerStatus, read_fleet
    from pulsesync.run.pointers import read_pointers
    from pulsesync.run.reporting import SyncReport
    from pulsesync.run.subscriber import Subscriber
    from pulsesync.state.sharding import Placed, tensor_parallel
    from pulsesync.state.slices import Slice
    from pulsesync.store import open_store

__all__ = [
    "AnotherPublisherError",
    "BaseMismatchError",
    "Broadcast",
    "BroadcastReport",
    "ChainError",
    "ChecksumError",
    "ClosedError",
    "Collective",
    "ConflictError",
    "Delegation",
    "FleetStatus",
    "FormatError",
    "GroupError",
    "LimitError",
    "MissingBucketError",
    "MissingLinkError",
    "NotFoundError",
    "NothingPublishedError",
    "Placed",
    "Pointer",
    "PointerMovedError",
    "PublishReport",
    "Publisher",
    "PulseError",
    "RoundError",
    "RunChangedError",
    "RunForkedError",
    "RunReplacedError",
    "RunRolledBackError",
    "ShardedPublisher",
    "SignatureError",
    "SigningKey",
    "Slice",
    "StaleWeightsError",
    "StateError",
    "StoreError",
    "Subscriber",
    "SyncReport",
    "UnsupportedError",
    "VerificationError",
    "WorkerStatus",
    "events",
    "listen",
    "loco",
    "move_pointer",
    "open_store",
    "read_fleet",
    "read_pointers",
    "show_progress",
    "tensor_parallel",
    "warm_up",
]

_MODULES = {"events": "core.events", "loco": "loco"}

_HOMES = {
    "Broadcast": "group.broadcast",
    "BroadcastReport": "group.broadcast",
    "Collective": "group.collective",
    "Delegation": "format.signature",
    "FleetStatus": "run.fleet",
    "Placed": "state.sharding",
    "Pointer": "format.pointer",
    "PublishReport": "publish.pending",
    "Publisher": "publish.publisher",
    "ShardedPublisher": "publish.sharded",
    "SigningKey": "format.signature",
    "Slice": "state.slices",
    "Subscriber": "run.subscriber",
    "SyncReport": "run.reporting",
    "WorkerStatus": "run.fleet",
    "listen": "core.events",
    "move_pointer": "maintain.point",
    "open_store": "store",
    "read_fleet": "run.fleet",
    "read_pointers": "run.pointers",
    "show_progress": "core.progress",
    "tensor_parallel": "state.sharding",
    "warm_up": "publish.warmup",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"pulsesync.{_MODULES[name]}")
    if name not in _HOMES:
        raise AttributeError(f"module 'pulsesync' has no attribute {name!r}")
    return getattr(import_module(f"pulsesync.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
