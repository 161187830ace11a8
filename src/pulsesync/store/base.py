"""What a store must be able to do. Objects are small files or whole parts; keys are paths with `/`."""

from collections.abc import Iterator
from typing import Protocol


class Store(Protocol):
    """Five verbs. Implementations translate their own exceptions into StoreError."""

    def get(self, key: str) -> bytes:
        """Return an object. Raises: NotFoundError."""

    def put(self, key: str, data: bytes) -> None:
        """Write an object, whole or not at all; one that exists is replaced."""

    def create(self, key: str, data: bytes) -> None:
        """Write an object that must not exist; of several at once, one succeeds. Raises: ConflictError."""

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the keys that begin with a prefix ending in `/`, sorted."""

    def delete(self, key: str) -> None:
        """Remove an object; none is no error."""
