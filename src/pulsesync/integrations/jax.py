"""JAX: publish any pytree of arrays, and sync one: the result is a new tree, and the old one is not changed.

    publisher = JaxPublisher("s3://bucket/run", cast="BF16")        # trainer
    publisher.publish(params, step=step)

    subscriber = JaxSubscriber("s3://bucket/run")                   # worker
    params = subscriber.sync(params)

The name of a tensor is its path in the tree, joined by dots: {"dense": {"kernel": …}} has "dense.kernel", and the first
element of a list under "layers" is "layers.0". Two leaves with the same name are refused.

Arrays on one GPU are read and written there, through DLPack and torch; nothing is copied to the host. JAX and torch
have streams of their own, so each waits for the other: JAX has computed an array before torch reads it, torch has read
it before JAX may donate or free it, and has written new weights before JAX copies them into memory of its own.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from pulsesync.core.extras import load
from pulsesync.errors import StateError, VerificationError
from pulsesync.integrations.frameworks import FrameworkSubscriber, published_tensors
from pulsesync.publish.publisher import Publisher
from pulsesync.run.reporting import SyncReport
from pulsesync.store import Location

__all__ = ["JaxPublisher", "JaxSubscriber", "JaxWeights"]

logger = logging.getLogger(__name__)


class JaxPublisher(Publisher):
    """A `Publisher` whose `publish` takes a pytree of `jax.Array`.

    Args:
        location: A path or URL of the run, or a store.
        options: As for `Publisher`: `cast`, `signing_key`, `publish_every`, `link`, ….
    """

    def __init__(self, location: Location, **options: Any) -> None:
        super().__init__(location, **options)

    def publish(self, params: Any, **options: Any) -> Any:  # type: ignore[override]
        """Publish a tree as the next version; the first one in full. It may be donated or deleted when this returns.

        Args:
            params: A pytree of `jax.Array`.
            options: As for `Publisher.publish`: `step`, `wait`, `now`, `coalesce`.

        Raises:
            StateError: a leaf is not an array, or this process has only a part of it, or two have the same name; and as
            `Publisher.publish`.
        """
        with lent(params):
            return super().publish(published_tensors(JaxWeights(params)), **options)


class JaxSubscriber(FrameworkSubscriber):
    """Syncs trees of `jax.Array` to the versions of a run.

    It keeps a copy of the weights, in host memory or on the arrays' GPU, in which versions are checked and applied. No
    array is ever written to: leaves that a version changes are new arrays, with the sharding of the old ones, and all
    others are the same objects as before.

    Args:
        location: A path or URL of the run, or a store.
        options: As for `Subscriber`: `trust`, `cache`, `follow`, `undo`, `verify_every`, ….
    """

    def __init__(self, location: Location, **options: Any) -> None:
        super().__init__(location, **options)
        self.report: SyncReport | None = None  # of the last sync

    def sync(self, params: Any, version: int | None = None, **options: Any) -> Any:  # type: ignore[override]
        """Return a tree like params with the weights of the newest version, or of a given one; set `report`.

        Args:
            params: A pytree of `jax.Array`, in the dtypes of the run, with any weights; those of a published version
                save the download of an anchor. It is never changed.
            version: The version to sync to; None: the newest.
            options: As for `Subscriber.sync`: `wait_s`, `verify`, `follow_replaced`.

        Raises:
            As `Subscriber.sync`, and StateError as `JaxPublisher.publish`.
        """
        with lent(params):
            weights = JaxWeights(params)
            self.report = super().sync(weights, version, **options)
        return weights.tree()

    def watch(self, params: Any, **options: Any) -> Iterator[Any]:  # type: ignore[override]
        """Yield a tree with the weights of each version as it is published. Raises: as `sync`.

        Args:
            params: As for `sync`.
            options: As for `Subscriber.watch`: `wait_s`, `interval_s`, `max_interval_s`, ….
        """
        weights = JaxWeights(params)
        for report in super().watch(weights, **options):
            self.report = report
            _wait_for_torch(map(weights.array, weights.names()))
            yield weights.tree()

    def roll_back(self, params: Any) -> Any:
        """Return a tree like params with the weights before the last sync that wrote, from memory.

        Raises:
            VerificationError: there is no sync to undo, or undoing it failed.
        """
        with lent(params):
            weights = JaxWeights(params)
            if super().roll_back(weights) is None:
                raise VerificationError("there is no sync to roll back; pass undo= to keep undo logs of more syncs")
        return weights.tree()

    def verify(self, params: Any) -> str:
        """Compare a tree with the version of the last sync, bit for bit; return the digest.

        Raises:
            VerificationError: it is not that version, or nothing was synced yet.
        """
        with lent(params):
            return super().verify(JaxWeights(params))


class JaxWeights:
    """A pytree of arrays as a `FrameworkWeights`; `tree` returns it with what was written.

    Args:
        params: A pytree of `jax.Array`.

    Raises:
        StateError: two leaves have the same name.
    """

    immutable = True

    def __init__(self, params: Any) -> None:
        jax = _jax()
        paths, self._structure = jax.tree_util.tree_flatten_with_path(params)
        self._leaves: dict[str, Any] = {}
        for path, leaf in paths:
            name = jax.tree_util.keystr(path, simple=True, separator=".") or "params"
            if name in self._leaves:
                raise StateError(
                    f"two leaves of the tree have the name {name!r}, because their paths differ only in dots or in the "
                    "types of keys; rename a key",
                    tensor=name,
                )
            self._leaves[name] = leaf
        self._by_torch = all_on_gpus(self._leaves.values())

    def names(self) -> Iterable[str]:
        return self._leaves

    def bits(self, name: str) -> Any:
        return array_bits(name, self._leaves[name], self._by_torch)

    def write(self, name: str, bits: Any) -> None:
        self._leaves[name] = array_like(name, self._leaves[name], bits)

    def array(self, name: str) -> Any:
        return self._leaves[name]

    def tree(self) -> Any:
        return self._structure.unflatten(self._leaves.values())


def all_on_gpus(arrays: Iterable[Any]) -> bool:
    """Return whether torch can read all arrays on their GPUs: each on one GPU. If not, all are copied to the host."""
    jax = _jax()
    return all(isinstance(array, jax.Array) and _through_torch(array) for array in arrays)


def array_bits(name: str, array: Any, by_torch: bool) -> Any:
    """Return an array's bits: a read-only numpy array or, by_torch, a tensor in the same memory. Raises: StateError."""
    jax = _jax()
    if not isinstance(array, jax.Array):
        raise StateError(f"{name!r} is a {type(array).__name__}, not a jax.Array; leave it out", tensor=name)
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise StateError(f"{name!r} has dtype {array.dtype}, which cannot be weights; leave it out", tensor=name)
    if array.is_deleted():
        raise StateError(f"{name!r} was deleted or donated; pass the arrays that replaced it", tensor=name)
    if not (array.is_fully_addressable or array.is_fully_replicated):
        raise StateError(
            f"{name!r} has shards on devices of other processes, which this one cannot read; gather it first with "
            "jax.experimental.multihost_utils.process_allgather, and publish in one process",
            tensor=name,
        )
    if not by_torch:
        return np.asarray(array)
    from torch.utils.dlpack import from_dlpack

    array.block_until_ready()  # torch reads it in another stream
    try:
        return from_dlpack(array)
    except (RuntimeError, BufferError, TypeError) as e:
        raise StateError(
            f"{name!r} ({array.dtype}) cannot be shared with torch through DLPack: {e}", tensor=name
        ) from e


def array_like(name: str, array: Any, bits: Any) -> Any:
    """Return a new array with these bits, in memory of its own, with the dtype and sharding of another one."""
    new = _from_host(array, bits) if isinstance(bits, np.ndarray) else _from_torch(array, bits)
    if (new.dtype, new.shape) != (array.dtype, array.shape):
        raise StateError(
            f"{name!r} must stay {array.dtype}{array.shape}; the new weights are {new.dtype}{new.shape}", tensor=name
        )
    return new


def _from_host(array: Any, bits: np.ndarray[Any, Any]) -> Any:
    jax, own = _jax(), np.array(bits, order="C")  # on CPUs device_put may share the memory, even with may_alias=False
    if not array.is_fully_addressable:
        return jax.make_array_from_callback(array.shape, array.sharding, lambda index: own[index])
    if array.committed:
        return jax.device_put(own, array.sharding)
    with jax.default_device(next(iter(array.devices()))):
        return jax.device_put(own)


def _from_torch(array: Any, bits: Any) -> Any:
    jax = _jax()
    _wait_for_torch([array])  # it has written the bits
    # A copy in JAX's own memory: no stream of JAX then reads what torch changes or frees.
    new = jax.device_put(jax.numpy.copy(jax.dlpack.from_dlpack(bits)), array.sharding)
    return new.block_until_ready()  # torch may change the bits again


@contextmanager
def lent(params: Any) -> Iterator[None]:
    """When this ends, torch has finished reading a tree: JAX may donate or free it."""
    try:
        yield
    finally:
        _wait_for_torch(_jax().tree.leaves(params))


def _wait_for_torch(arrays: Iterable[Any]) -> None:
    jax = _jax()
    shared = [array for array in arrays if isinstance(array, jax.Array) and _through_torch(array)]
    for gpu in {next(iter(array.sharding.device_set)).local_hardware_id for array in shared}:
        import torch

        torch.cuda.synchronize(gpu)


def _through_torch(array: Any) -> bool:
    """Return whether torch can read an array in place: on one GPU."""
    sharding = array.sharding
    if len(sharding.device_set) != 1 or sharding.memory_kind not in (None, "device"):
        return False
    return next(iter(sharding.device_set)).platform in ("gpu", "cuda") and _torch_sees_gpu()


@cache
def _torch_sees_gpu() -> bool:
    found = False
    with suppress(ModuleNotFoundError):
        import torch

        found = torch.cuda.is_available()
    if not found:
        logger.warning(
            "JAX has a GPU, but torch does not find one, so weights are copied through host memory. Install torch for "
            "CUDA, which includes Triton, to compare and write them on the GPU."
        )
    return found


def _jax() -> Any:
    """Return the module jax. Raises: PulseError, if it is not installed."""
    for module in ("jax.dlpack", "jax.dtypes"):
        load(module, "jax")
    return load("jax", "jax")
