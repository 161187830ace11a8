"""Whether an object may be used: by the process that used it first, until it is closed."""

import os

from pulsesync.core.threads import SignalSafeFlag
from pulsesync.errors import ClosedError


class ProcessGuard:
    """The process that an object belongs to, and whether the object was closed.

    A process that was forked from that one has none of its threads, and a lock that was taken at the time of the fork
    stays locked in it for ever: check before any lock is taken. An object that was not used before the fork has
    neither, so it belongs to no process until `claim`.

    Args:
        name: Of the object's class, for messages.
        forked: What a message says of a forked process, after "which was forked from it".
        closed: What a message says of a closed object, after its name.
    """

    def __init__(self, name: str, forked: str, closed: str) -> None:
        self._name, self._if_forked, self._if_closed = name, forked, closed
        self.process: int | None = None
        self.closed = SignalSafeFlag()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that the object belongs to."""
        return self.process not in (None, os.getpid())

    def check_process(self) -> None:
        """Raises: ClosedError, in a forked process."""
        if self.is_forked:
            raise ClosedError(
                f"this {self._name} belongs to process {self.process}; this is process {os.getpid()}, which was forked "
                f"from it{self._if_forked}"
            )

    def check_open(self) -> None:
        """Raises: ClosedError, if the object was closed."""
        if self.closed.is_set():
            raise ClosedError(f"this {self._name} {self._if_closed}")

    def claim(self) -> None:
        """Have the object belong to this process. Raises: ClosedError, if it is closed or belongs to another."""
        self.check_process()
        self.check_open()
        self.process = os.getpid()
