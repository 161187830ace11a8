"""A run in Ray's object store.

    store = RayStore("run")         # found by this name from every process of the cluster, and picklable

A small actor, the directory, knows all objects, and implements create-if-absent. Large objects are in the object store
of the directory's node and are owned by the directory: a writer may be killed as soon as its call has returned. A
reader on that node maps them into memory, and to another node Ray fetches them once for all readers there.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pulsesync.core.types import Bits
from pulsesync.errors import ConflictError, NotFoundError, PulseError, StoreError
from pulsesync.integrations.ray.cluster import check_joined, find_actor, kill_actor, named_actor, ray
from pulsesync.store.base import ObjectEntry
from pulsesync.store.keys import check_key, check_prefix

INLINE_BYTES = 64 << 10  # the directory itself keeps objects up to this size: Ray would send them inline in any case
_THREADS = 8


@dataclass(frozen=True)
class _Object:
    content: Any  # bytes, or a reference to an array of bytes
    size_bytes: int
    modified_s: float


class ObjectDirectory:
    """The actor that has all objects by key. Its methods are called through Ray, by several threads."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._loans: dict[str, tuple[float, Any]] = {}  # by loan, until when at most, and what is being read
        self._lock = threading.Lock()

    def write(self, key: str, data: bytes | Bits, create: bool) -> bool:
        """Keep an object. Return False if it should be created and exists already."""
        if create and key in self._objects:
            return False  # found out before anything is copied
        # The process that puts an object into Ray owns it, and it is lost with its owner: so the directory puts it.
        content = data if isinstance(data, bytes) else ray().put(data)
        with self._lock:
            self._end_old_loans()
            if create and key in self._objects:
                return False
            self._objects[key] = _Object(content, len(data), time.time())
        return True

    def read(self, key: str, begin: int, end: int | None, loan: str, loan_s: float) -> bytes | list[Any] | None:
        """Return the requested bytes, a reference to the entire object in a list, or None if there is none.

        The object of a reference stays until `end_loan`, even if it is replaced or deleted meanwhile; if the reader
        dies, for loan_s. Ray's own counting of references is not enough: where two threads of a process read an object
        while it is replaced, about one replacement in 1,400 freed it under a reader, which then waited for ever.
        """
        if (found := self._objects.get(key)) is None:
            return None
        if isinstance(found.content, bytes):
            return found.content[begin:end]
        with self._lock:
            self._end_old_loans()
            self._loans[loan] = time.monotonic() + loan_s, found.content
        return [found.content]

    def end_loan(self, loan: str) -> None:
        with self._lock:
            self._loans.pop(loan, None)

    def _end_old_loans(self) -> None:
        now = time.monotonic()
        for loan in [loan for loan, (until, _) in self._loans.items() if until < now]:
            del self._loans[loan]

    def list(self, prefix: str) -> list[tuple[str, int, float]]:
        with self._lock:
            found = sorted((key, one) for key, one in self._objects.items() if key.startswith(prefix))
        return [(key, one.size_bytes, one.modified_s) for key, one in found]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(key, None)  # Ray frees the bytes once no reader has them mapped


class RayStore:
    """Objects by key, in the cluster of this process. The first to construct a name starts its directory, on its node.

    A store that was pickled looks for the directory and never starts one, so that a run that is gone does not look like
    an empty one. All objects are lost with the directory (`close`, or its node) and with the cluster.

    Args:
        name: Name of the run in the cluster.
        timeout_s: Every call ends within this time.

    Raises:
        PulseError: Ray is not installed, or this process is not connected to a cluster.
    """

    def __init__(self, name: str, timeout_s: float = 60.0) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._actor: Any = named_actor(ObjectDirectory, self._actor_name, _THREADS)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        check_key(key)
        loan = os.urandom(16).hex()
        found = self._call("read", key, begin, end, loan, 2 * self.timeout_s)  # this call, and the one below
        if found is None:
            raise NotFoundError(f"there is no {key} in {self.name} of Ray", key=key)
        if isinstance(found, bytes):
            return found
        try:
            with self._translated(key, "read"):
                array: Bits = ray().get(found[0], timeout=self.timeout_s)  # mapped, not copied
                return array[begin:end].tobytes()
        finally:
            with suppress(PulseError):  # this process has left the cluster
                self._send("end_loan", loan)  # nobody waits for it

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        self._call("write", key, _sendable(data), False)

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        if not self._call("write", key, _sendable(data), True):
            raise ConflictError(f"{key} exists already in {self.name} of Ray", key=key)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        check_prefix(prefix)
        return (ObjectEntry(*found) for found in self._call("list", prefix))

    def delete(self, key: str) -> None:
        check_key(key)
        self._call("delete", key)

    def close(self) -> None:
        """Delete the run with all its objects, for all processes."""
        kill_actor(self._actor_name)

    @property
    def _actor_name(self) -> str:
        return f"store/{self.name}"

    def __getstate__(self) -> dict[str, Any]:
        return {"name": self.name, "timeout_s": self.timeout_s, "_actor": None}

    def _call(self, verb: str, key: str, *rest: Any) -> Any:
        with self._translated(key, verb):
            if self._actor is None:
                self._actor = find_actor(self._actor_name)
            if self._actor is None:
                raise StoreError(
                    f"there is no run {self.name} in this Ray cluster: it was closed, or its node is gone; create a "
                    "new Link or RayStore",
                    key=key,
                )
            return ray().get(self._send(verb, key, *rest), timeout=self.timeout_s)

    def _send(self, verb: str, *given: Any) -> Any:
        check_joined()  # or the call would start a cluster, for instance that of a thread that outlives ray.shutdown
        return getattr(self._actor, verb).remote(*given)

    @contextmanager
    def _translated(self, key: str, verb: str) -> Iterator[None]:
        errors = ray("exceptions")
        try:
            yield
        except PulseError:
            raise
        except (errors.GetTimeoutError, errors.ObjectFetchTimedOutError) as e:
            raise StoreError(
                f"{verb} {key}: no answer in {self.timeout_s:g} s; check that the Ray cluster is not overloaded",
                key=key,
                retryable=True,
            ) from e
        except errors.ObjectLostError as e:
            raise NotFoundError(f"{key} is lost, because the node that had it is gone", key=key) from e
        except errors.RayError as e:
            passing = (errors.ActorUnavailableError, errors.ObjectStoreFullError, errors.OutOfDiskError)
            found = getattr(e, "cause", None) if isinstance(e, errors.RayTaskError) else e
            said = str(e).splitlines()[0][:200]
            raise StoreError(f"{verb} {key}: {said}", key=key, retryable=isinstance(found, passing)) from e


def _sendable(data: bytes | memoryview) -> bytes | Bits:
    """Return small data unchanged; large data as an array, which Ray shares instead of copying."""
    return bytes(data) if len(data) <= INLINE_BYTES else np.frombuffer(data, np.uint8)
