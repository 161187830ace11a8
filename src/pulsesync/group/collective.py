"""Processes that act together: each calls the same methods in the same order, and all see the same result.

`Team` is what is asked of one. `Collective` is a process group of torch.distributed, over gloo or NCCL: bytes travel at
their exact lengths, sizes first, every wait has an end, and what went is counted.

A rank that dies closes its connections, so the ranks that wait for it get an error at once; but a collective runs
around a ring or down a tree, and the other ranks wait for those that got the error. Over gloo a rank that gets an error
therefore closes its own connections to the group: the error reaches every rank within milliseconds.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import numpy as np

from pulsesync.core.types import Bits
from pulsesync.errors import GroupError

MAX_NOTE_BYTES = 1 << 30  # that anybody gathers from one process
CLOSING_TAG = 0x70756C73  # of a message that no rank ever sends


class Team(Protocol):
    """Some processes, numbered from 0."""

    rank: int
    size: int

    def gather(self, note: bytes) -> list[bytes]:
        """Tell everybody something; return what each has told, by rank.

        Raises:
            GroupError: somebody did not come, or came with something else.
        """
        ...


class SoloTeam:
    """A team of one."""

    rank, size = 0, 1

    def gather(self, note: bytes) -> list[bytes]:
        return [note]


class Collective:
    """A process group, the default one if none is given.

    Args:
        group: The group. It should be used for nothing else while this is. After a GroupError it is of no use: over
            gloo its connections are closed, so that no other rank waits for this one.
        timeout_s: How long to wait for the others, each time. A group has a timeout of its own: the shorter one counts.
    """

    def __init__(self, group: Any = None, timeout_s: float = 300.0) -> None:
        import torch
        from torch import distributed

        self.group, self.timeout_s = group, timeout_s
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        backend = distributed.get_backend(group)
        self._over_gloo, on_gpu = backend == "gloo", backend == "nccl"
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self.messages = self.sent_bytes = self.received_bytes = 0
        self.last_s = math.nan  # how long the last gather of a fixed size took

    def gather(self, note: bytes) -> list[bytes]:
        lengths = [int(row[0]) for row in self.gather_rows(np.array([len(note)], np.int64))]
        self._check_lengths(lengths, MAX_NOTE_BYTES)
        padded = np.frombuffer(note.ljust(max(lengths), b"\0"), np.uint8)
        rows = self.gather_rows(padded) if max(lengths) else [padded] * self.size
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def gather_rows(self, row: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The same for an array, which everybody has in the same shape and dtype: one message."""
        import torch
        from torch import distributed

        began = time.perf_counter()
        mine = torch.from_numpy(np.ascontiguousarray(row).view(np.uint8).copy()).to(self._device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: distributed.all_gather(rows, mine, group=self.group, async_op=True))
        self.messages += 1
        self.sent_bytes += (self.size - 1) * mine.nbytes
        self.received_bytes += (self.size - 1) * mine.nbytes
        self.last_s = time.perf_counter() - began
        return [one.cpu().numpy().view(row.dtype) for one in rows]

    def broadcast_(self, buffer: Bits, source: int) -> None:
        """Fill a buffer of bytes with that of one rank, where it has the same length."""
        import torch
        from torch import distributed

        tensor = torch.from_numpy(buffer)
        there = tensor.to(self._device)
        place = self._global(source)
        self._wait(lambda: distributed.broadcast(there, place, group=self.group, async_op=True))
        if source == self.rank:
            self.sent_bytes += buffer.nbytes
        else:
            self.received_bytes += buffer.nbytes
            if there is not tensor:
                tensor.copy_(there)
        self.messages += 1

    def send_(self, buffer: Bits, source: int, to: Sequence[int]) -> None:
        """The same, for some ranks alone; others need not call this."""
        import torch
        from torch import distributed

        tensor = torch.from_numpy(buffer)
        there = tensor.to(self._device)
        if self.rank == source:
            for rank in to:
                place = self._global(rank)
                self._wait(partial(distributed.isend, there, place, group=self.group))
                self.sent_bytes += buffer.nbytes
                self.messages += 1
        elif self.rank in to:
            self._wait(lambda: distributed.irecv(there, self._global(source), group=self.group))
            self.received_bytes += buffer.nbytes
            self.messages += 1
            if there is not tensor:
                tensor.copy_(there)

    def swap(self, outgoing: Sequence[bytes], most: int) -> list[bytes]:
        """Send each rank its bytes, `most` at most; return what each has sent here. Nothing goes to oneself."""
        import torch
        from torch import distributed

        lengths = [0 if rank == self.rank else len(data) for rank, data in enumerate(outgoing)]
        coming = [int(row[self.rank]) for row in self.gather_rows(np.array(lengths, np.int64))]
        self._check_lengths(coming, most)
        boxes = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in coming]
        moves = []
        for rank, data in enumerate(outgoing):
            place = self._global(rank)
            if lengths[rank]:
                full = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
                moves.append(distributed.P2POp(distributed.isend, full, place, self.group))
            if coming[rank]:
                moves.append(distributed.P2POp(distributed.irecv, boxes[rank], place, self.group))
        works = self._translated(lambda: distributed.batch_isend_irecv(moves)) if moves else []
        for work in works:
            self._end(work)
        self.messages += len(moves)
        self.sent_bytes += sum(lengths)
        self.received_bytes += sum(coming)
        return [box.cpu().numpy().tobytes() for box in boxes]

    def _global(self, rank: int) -> int:
        from torch import distributed

        return distributed.get_global_rank(self.group, rank) if self.group else rank

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begin something, and wait for its end."""
        work = self._translated(begin)
        if work is None:
            raise GroupError("this process is not in the group", rank=self.rank)
        self._end(work)

    def _end(self, work: Any) -> None:
        if self._translated(lambda: work.wait(timedelta(seconds=self.timeout_s))) is False:
            raise self._failure(f"rank {self.rank} waited {self.timeout_s:g} s for the others")

    def _translated(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RuntimeError, ValueError) as e:  # torch's own: timeouts, closed connections, a destroyed group
            raise self._failure(
                f"rank {self.rank} lost the others: one died, fell {self.timeout_s:g} s behind, or does something else "
                f"({str(e).splitlines()[0][-160:]})"
            ) from e

    def _check_lengths(self, lengths: Sequence[int], most: int) -> None:
        """Check what the ranks, in their order, report to send. Raises: GroupError."""
        for rank, length in enumerate(lengths):
            if not 0 <= length <= most:
                raise self._failure(
                    f"the group is out of step: rank {rank} reports {length} bytes, and 0 to {most} are allowed"
                )

    def _failure(self, why: str) -> GroupError:
        """Return the error to raise, after making sure that no other rank waits for this one.

        torch has no call that closes connections over gloo: `abort` and `shutdown` do nothing, and a group is destroyed
        only once its pending works have ended. But gloo closes all connections of a group when a receive times out.
        """
        import torch
        from torch import distributed

        devices = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has its own connections, chosen by tag
        for tag in range(CLOSING_TAG, CLOSING_TAG + devices) if self._over_gloo else ():
            for rank in range(self.size):
                with suppress(RuntimeError, ValueError):  # that it timed out, or that the connection is closed already
                    work = distributed.irecv(torch.empty(1, dtype=torch.uint8), self._global(rank), self.group, tag)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))
        return GroupError(why, rank=self.rank)
