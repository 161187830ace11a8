"""Publish and sync the weights of any framework, through a class with three methods.

    class MyWeights:                                   # a FrameworkWeights
        def names(self): ...                           # names of the tensors, the same in every process
        def bits(self, name): ...                      # a tensor as it is now: a numpy array, or a torch tensor
        def write(self, name, bits): ...               # copy new weights into the tensor

    Publisher("s3://bucket/run").publish(published_tensors(MyWeights(model)), step=step)     # trainer

    follower = FrameworkSubscriber("s3://bucket/run")                                        # worker
    follower.sync(MyWeights(model))

`pulsesync.testing.FrameworkTests` is a test suite for such a class. `jax` and `keras` are built on this.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol, Self

import numpy as np

from pulsesync import device
from pulsesync.core.threads import spread
from pulsesync.errors import StateError, VerificationError
from pulsesync.run.integrity import written_by_another
from pulsesync.run.reporting import SyncReport
from pulsesync.run.subscriber import Subscriber
from pulsesync.state.host import HostBackend
from pulsesync.store import Location

__all__ = ["FrameworkSubscriber", "FrameworkWeights", "published_tensors"]


class FrameworkWeights(Protocol):
    """The weights of a model in some framework, by name.

    An implementation may have an attribute `immutable = True` if a `write` does not change what `bits` returned before.
    Then no copy of the old weights is made while new ones are written.
    """

    def names(self) -> Iterable[str]:
        """The names of all tensors: each once, and the same in the trainer and in every worker."""

    def bits(self, name: str) -> Any:
        """A tensor with its shape, dtype and exact bits.

        It is a numpy array (bfloat16 and float8 of ml_dtypes), or a torch tensor, in host memory or on a CUDA device.
        It may be a view of live memory. It is never written to, and not read after the call that asked for it returns.
        """

    def write(self, name: str, bits: Any) -> None:
        """Replace the weights of a tensor by those of an array or tensor of the kind that `bits` returns.

        They must be copied: the next sync changes that memory. If this raises, the sync ends, and the old weights of
        the tensors written so far are restored, through this method.
        """


def published_tensors(weights: FrameworkWeights) -> dict[str, Any]:
    """Return the tensors of a framework as `Publisher.publish` takes them: by name, without copies where possible.

    Two names for the same memory are two tensors here, not a tie: frameworks with immutable arrays share memory freely,
    and the next step ends that.

    Raises:
        StateError: two tensors have the same name; or what `bits` raises.
    """
    tensors: dict[str, Any] = {}
    places: set[int] = set()
    for name in weights.names():
        if name in tensors:
            raise StateError(f"two tensors have the name {name!r}; rename one, names must be unique", tensor=name)
        tensor = weights.bits(name)
        place = _address(name, tensor)
        tensors[name] = _copy(tensor) if place in places else tensor
        places |= {place} - {0}
    return tensors


class FrameworkSubscriber:
    """Follows a run with the weights of any framework.

    It keeps a copy of the weights, which a `Subscriber` syncs to a version as one transaction: in host memory for numpy
    arrays, on the same GPU for torch tensors on a GPU. Then every tensor that differs from the copy is written to the
    framework, also one that something else has changed since the last sync. If a write fails, the old weights of the
    tensors that were written are restored; a repeated sync continues from the copy.

    Args:
        location: A path or URL of the run, or a store.
        options: As for `Subscriber`: `trust`, `cache`, `follow`, `undo`, `verify_every`, ….
    """

    def __init__(self, location: Location, **options: Any) -> None:
        self.subscriber = Subscriber(location, **options)
        self._copy: dict[str, Any] = {}
        self._kind: dict[str, tuple[Any, ...]] = {}  # shapes and dtypes of the copied tensors

    @property
    def version(self) -> int | None:
        """The version of the last sync; None before the first."""
        return self.subscriber.version

    def sync(self, weights: FrameworkWeights, version: int | None = None, **options: Any) -> SyncReport:
        """Update the weights to the newest version, or to a given one.

        Args:
            weights: The weights to read and write.
            version: The version to update to; None: the newest.
            options: As for `Subscriber.sync`: `wait_s`, `verify`, `follow_replaced`.

        Raises:
            As `Subscriber.sync`, or what `write` raised; the weights are then unchanged. VerificationError with
            `torn=True`: writing failed, and restoring the old weights failed too; do not use the weights until a sync
            succeeds.
        """
        tensors = self._attached(weights)
        return self._written(self.subscriber.sync(self._copy, version, **options), weights, tensors)

    def watch(self, weights: FrameworkWeights, **options: Any) -> Iterator[SyncReport]:
        """Update the weights to each version as it is published, and yield the report of each. Raises: as `sync`.

        Args:
            weights: The weights to read and write.
            options: As for `Subscriber.watch`.
        """
        self._attached(weights)
        for report in self.subscriber.watch(self._copy, **options):
            yield self._written(report, weights, published_tensors(weights))

    def roll_back(self, weights: FrameworkWeights) -> int | None:
        """Undo the last sync that wrote, from memory. Return the version, None if there is no sync to undo."""
        version = self.subscriber.roll_back()
        if version is not None:
            self._write(weights, published_tensors(weights))
        return version

    def verify(self, weights: FrameworkWeights) -> str:
        """Recount the digest of the version and compare the weights with it, bit for bit; return the digest.

        Raises:
            VerificationError: nothing was synced yet, or something else has changed the weights.
        """
        digest = self.subscriber.verify()
        if differing := _differing(published_tensors(weights), self._copy):
            raise VerificationError(written_by_another(self.version, differing[0]), tensor=differing[0])
        return digest

    def close(self) -> None:
        """Release the copy and the undo logs. The weights are not changed."""
        self.subscriber.close()
        self._copy, self._kind = {}, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _attached(self, weights: FrameworkWeights) -> dict[str, Any]:
        """Return the tensors of the weights; if they are not those of the last sync, make a copy of them first."""
        tensors = published_tensors(weights)
        kind = {name: _kind(tensor) for name, tensor in tensors.items()}
        if kind != self._kind:
            self._copy = {name: _copy(tensor) for name, tensor in tensors.items()}
            self._kind = kind
        return tensors

    def _written(self, report: SyncReport, weights: FrameworkWeights, tensors: Mapping[str, Any]) -> SyncReport:
        """Write what a sync of the copy has changed; `apply_s` becomes the time in which the weights change."""
        began = time.perf_counter()
        writing_s = self._write(weights, tensors)
        before_s = time.perf_counter() - began - writing_s
        return replace(report, prepare_s=report.prepare_s + report.apply_s + before_s, apply_s=writing_s)

    def _write(self, weights: FrameworkWeights, tensors: Mapping[str, Any]) -> float:
        """Write what differs from the copy, and return the seconds; if that fails, restore the old weights."""
        immutable = getattr(weights, "immutable", False)
        names, old = _differing(tensors, self._copy), dict[str, Any]()
        began = time.perf_counter()
        try:
            for name in names:
                old[name] = tensors[name] if immutable else _copy(tensors[name])
                weights.write(name, self._copy[name])
        except BaseException as e:
            _write_back(weights, old, e)
            raise
        return time.perf_counter() - began


def _write_back(weights: FrameworkWeights, old: Mapping[str, Any], failure: BaseException) -> None:
    for name, bits in old.items():
        try:
            weights.write(name, bits)
        except Exception as e:  # noqa: BLE001 - a framework may raise anything
            raise VerificationError(
                f"writing the weights failed ({failure}), and so did restoring the old ones, at {name!r} ({e}): the "
                "weights are between two versions; do not use them until a sync succeeds",
                tensor=name,
                torn=True,
            ) from failure


def _differing(tensors: Mapping[str, Any], copies: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors whose bits differ from those of their copies."""
    backend: Any = HostBackend if device.find(copies) is None else device.load("state").DeviceBackend
    new, old = backend.views(tensors), backend.views(copies)

    def equal(name: str) -> bool:
        return bool(backend.equal(new[name].flat, old[name].flat))

    names = list(copies)
    found = spread(equal, names) if backend is HostBackend else [equal(name) for name in names]
    return [name for name, same in zip(names, found, strict=True) if not same]


def _copy(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, order="C")
    import torch

    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _address(name: str, tensor: Any) -> int:
    """Return the address of a tensor's weights; 0 if it has none. Raises: StateError, if it is not a tensor."""
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data if tensor.size else 0
    if not hasattr(tensor, "data_ptr"):
        kind = type(tensor).__name__
        raise StateError(f"bits({name!r}) must return a numpy array or a torch tensor; got {kind}", tensor=name)
    return int(tensor.data_ptr())


def _kind(tensor: Any) -> tuple[Any, ...]:
    return type(tensor), tuple(tensor.shape), str(tensor.dtype), str(getattr(tensor, "device", "cpu"))
