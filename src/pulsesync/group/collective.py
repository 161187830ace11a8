"""Processes that act together: each calls the same methods in the same order, and all see the same result.

`Team` is the interface. `Collective` is a process group of torch.distributed, over gloo or NCCL: bytes travel at their
exact lengths, sizes first, every wait has a timeout, and traffic is counted.

Over gloo, a rank that dies closes its connections, so the ranks that wait for it get an error at once; but a collective
runs around a ring or down a tree, and the other ranks wait for those that got the error. A rank that gets an error
therefore closes its own connections to the group: the error reaches every rank within milliseconds.

Over NCCL, nothing notifies the other ranks: each gets its error when its own `timeout_s` has passed, or earlier where
NCCL itself notices that a connection broke. A rank that gets an error aborts its communicator, because a kernel that
waits for a dead rank would otherwise occupy the GPU for good. But torch has a watchdog, which looks at each message ten
times a second: when it sees an error of NCCL, or a message that is older than the *group's* timeout (10 minutes if it
was not chosen), it ends the whole process, 60 s later. For a GroupError instead:

- create the group with a longer timeout than `timeout_s`: `new_group(..., backend="nccl", timeout=...)`;
- where a process must outlive the death of another rank, create the group while the environment has
  `TORCH_NCCL_BLOCKING_WAIT=1`. It is read when a group is created: that group has no watchdog, others keep theirs.
  `TORCH_NCCL_ASYNC_ERROR_HANDLING=0` is not enough: the watchdog then ends nothing itself, but still asks all ranks for
  a dump, and the thread that makes it ends the process (`TORCH_NCCL_ENABLE_MONITORING`).

This was read in a copy of torch's ProcessGroupNCCL.cpp from after 2.7, with which the header of 2.13 agrees. Only the
timeout of a wait in a group of one has a test.
"""

import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from pulsesync.core.extras import missing
from pulsesync.core.types import Bits
from pulsesync.errors import GroupError

MAX_NOTE_BYTES = 1 << 30  # of a note that is gathered from one process
CLOSING_TAG = 0x70756C73  # tag of a message that no rank ever sends
ABORT_S = 30.0  # that a communicator of NCCL is given to abort
# a message over NCCL is polled without pauses for the first, then with pauses up to the second
IMPATIENT_S, LONGEST_PAUSE_S = 100e-6, 1e-3

if TYPE_CHECKING:
    import torch

ByteBuffer: TypeAlias = "Bits | torch.Tensor"  # one-dimensional and contiguous: a numpy array, or uint8 in any memory


class Team(Protocol):
    """Some processes, numbered from 0."""

    rank: int
    size: int

    def gather(self, note: bytes) -> list[bytes]:
        """Send a note to all processes; return the notes of all, by rank.

        Raises:
            GroupError: a process did not call this in time, or made another call.
        """


class SoloTeam:
    """A team of one."""

    rank, size = 0, 1

    def gather(self, note: bytes) -> list[bytes]:
        return [note]


class HelperThread:
    """A thread that makes calls for others, which may stop waiting for it; it adds 35 µs to a call.

    It ends with this object, and does not keep the process alive, even if it hangs in a call.
    """

    def __init__(self) -> None:
        calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        Thread(target=_serve, args=[calls], name="pulsesync-helper", daemon=True).start()
        self._calls = calls
        weakref.finalize(self, calls.put, None)

    def call(self, function: Callable[[], Any], most_s: float) -> Any:
        """Return or raise what the function does. Raises: TimeoutError: too late; this thread can no longer be used."""
        outcome = Future[Any]()
        self._calls.put((outcome, function))
        try:
            return outcome.result(most_s)
        finally:
            # it refers to the error, whose traceback refers to this frame: a cycle would delay freeing both
            del outcome


def _serve(calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (call := calls.get()) is not None:
        outcome, function = call
        try:
            outcome.set_result(function())
        except BaseException as e:  # noqa: BLE001 - raised again in the thread that waits
            outcome.set_exception(e)
        del call, outcome, function  # so that none of them is kept until the next call


class Collective:
    """A process group, the default one if none is given.

    `device` is where messages travel from: the CPU, or over NCCL the GPU that was torch's current one when this was
    made. A buffer on that device is sent in place; other memory is copied, for GPU memory over gloo through pinned host
    memory. What is sent must be finished in the current stream; what was received is there for every stream, and for
    the host.

    Args:
        group: The group. Use it for nothing else at the same time. After a GroupError it can no longer be used: over
            gloo its connections are closed, so that no other rank waits for this one; over NCCL its communicator is
            aborted, and the other ranks wait until their own `timeout_s`.
        timeout_s: How long to wait for the other ranks, at each message. A group has a timeout of its own: over gloo
            the shorter one counts; over NCCL the group's must be the longer one, or torch's watchdog ends the process
            (see the text at the top of this module).

    Raises:
        PulseError: torch is not installed.
    """

    def __init__(self, group: Any = None, timeout_s: float = 300.0) -> None:
        try:
            import torch
            from torch import distributed
        except ModuleNotFoundError as e:
            raise missing(e, "torch") from e

        self.group, self.timeout_s = group, timeout_s
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._over_nccl = distributed.get_backend(group) == "nccl"
        # also together with NCCL: then messages travel from the CPU
        self._over_gloo = "cpu:gloo" in distributed.get_backend_config(group)
        self.device = torch.device("cuda", torch.cuda.current_device()) if self._over_nccl else torch.device("cpu")
        self._helper: HelperThread | None = None  # over NCCL, from the first message on
        self.messages = self.sent_bytes = self.received_bytes = 0
        self.last_s = math.nan  # how long the last gather of a fixed size took

    @property
    def _dist(self) -> Any:
        from torch import distributed

        return distributed

    def gather(self, note: bytes) -> list[bytes]:
        lengths = [int(row[0]) for row in self.gather_rows(np.array([len(note)], np.int64))]
        self._check_lengths(lengths, MAX_NOTE_BYTES)
        padded = np.frombuffer(note.ljust(max(lengths), b"\0"), np.uint8)
        rows = self.gather_rows(padded) if max(lengths) else [padded] * self.size
        return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]

    def gather_rows(self, row: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The same for an array, which has the same shape and dtype on every rank: one message."""
        import torch

        began = time.perf_counter()
        mine = torch.from_numpy(np.ascontiguousarray(row).view(np.uint8).copy()).to(self.device)
        rows = torch.empty((self.size, *mine.shape), dtype=torch.uint8, device=self.device)
        self._wait(lambda: self._dist.all_gather(list(rows), mine, group=self.group, async_op=True))
        self.messages += 1
        self.sent_bytes += (self.size - 1) * mine.nbytes
        self.received_bytes += (self.size - 1) * mine.nbytes
        self.last_s = time.perf_counter() - began
        return [one.view(row.dtype) for one in rows.cpu().numpy()]

    def broadcast_(self, buffer: ByteBuffer, source: int) -> None:
        """Fill a buffer of bytes with that of one rank, which has the same length."""
        tensor, place = _as_tensor(buffer), self._global(source)
        there = self._stage(tensor, filled=source == self.rank)
        self._wait(lambda: self._dist.broadcast(there, place, group=self.group, async_op=True))
        if source == self.rank:
            self.sent_bytes += tensor.nbytes
        else:
            self.received_bytes += tensor.nbytes
            self._unstage(there, tensor)
        self.messages += 1

    def send_(self, buffer: ByteBuffer, source: int, to: Sequence[int]) -> None:
        """The same, for some ranks only; others need not call this. All ranks must have made another call before."""
        if self.rank == source:
            there = self._stage(_as_tensor(buffer), filled=True)
            self._transfer([self._dist.P2POp(self._dist.isend, there, self._global(r), self.group) for r in to])
            self.sent_bytes += len(to) * there.nbytes
            self.messages += len(to)
        elif self.rank in to:
            tensor = _as_tensor(buffer)
            there = self._stage(tensor, filled=False)
            self._transfer([self._dist.P2POp(self._dist.irecv, there, self._global(source), self.group)])
            self.received_bytes += tensor.nbytes
            self.messages += 1
            self._unstage(there, tensor)

    def swap(self, outgoing: Sequence[bytes], most: int) -> list[bytes]:
        """Send each other rank its bytes, `most` at most; return what each has sent here."""
        import torch

        lengths = [0 if rank == self.rank else len(data) for rank, data in enumerate(outgoing)]
        coming = [int(row[self.rank]) for row in self.gather_rows(np.array(lengths, np.int64))]
        self._check_lengths(coming, most)
        boxes = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in coming]
        operations = []
        for rank, data in enumerate(outgoing):
            place = self._global(rank)
            if lengths[rank]:
                full = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
                operations.append(self._dist.P2POp(self._dist.isend, full, place, self.group))
            if coming[rank]:
                operations.append(self._dist.P2POp(self._dist.irecv, boxes[rank], place, self.group))
        self._transfer(operations)
        self.messages += len(operations)
        self.sent_bytes += sum(lengths)
        self.received_bytes += sum(coming)
        return [box.cpu().numpy().tobytes() for box in boxes]

    def _stage(self, tensor: "torch.Tensor", filled: bool) -> "torch.Tensor":
        """Return memory on `device` for a message: the tensor's own if it lies there, or a copy if it is to be sent."""
        import torch

        if tensor.device == self.device:
            return tensor
        pinned = tensor.is_cuda and not self._over_nccl
        there = torch.empty(tensor.shape, dtype=torch.uint8, device=self.device, pin_memory=pinned)
        if filled:
            _copy(there, tensor)
        return there

    def _unstage(self, there: "torch.Tensor", tensor: "torch.Tensor") -> None:
        if there is not tensor:
            _copy(tensor, there)

    def _global(self, rank: int) -> int:
        return self._dist.get_global_rank(self.group, rank) if self.group else rank

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begin an operation, and wait for its end."""
        work = self._begin(begin)
        if work is None:
            raise GroupError(
                "this process is not in the group; call this on the ranks of the group only", rank=self.rank
            )
        self._end(work)

    def _transfer(self, operations: Sequence[Any]) -> None:
        """Send and receive, all at once.

        Over NCCL this must be a batch: it uses the communicator of the group, where a message by itself makes another
        one for each pair of ranks.
        """
        for work in self._begin(lambda: self._dist.batch_isend_irecv(list(operations))) if operations else []:
            self._end(work)

    def _begin(self, begin: Callable[[], Any]) -> Any:
        """Begin an operation. NCCL connects ranks at their first message, and waits for them without a timeout."""
        if not self._over_nccl:
            return self._translated(begin)
        import torch

        stream, inference = torch.cuda.current_stream(self.device), torch.is_inference_mode_enabled()

        def begin_as_here() -> Any:
            # The current device of a new thread is the first GPU, on which it would allocate memory for nothing.
            torch.cuda.set_device(self.device)
            with torch.inference_mode(inference), torch.cuda.stream(stream):
                return begin()

        self._helper = self._helper or HelperThread()
        helper = self._helper
        try:
            return self._translated(lambda: helper.call(begin_as_here, self.timeout_s))
        except TimeoutError as e:
            raise self.failure(
                f"rank {self.rank} waited {self.timeout_s:g} s for a connection to the other ranks"
            ) from e

    def _end(self, work: Any) -> None:
        if self._over_nccl:
            self._end_on_gpu(work)
        elif self._translated(lambda: work.wait(timedelta(seconds=self.timeout_s))) is False:
            raise self._too_late()

    def _end_on_gpu(self, work: Any) -> None:
        """Wait until the GPU has finished an operation, so that launches in any stream see its result.

        torch's own `wait(timeout)` polls once in a millisecond, which is longer than a short message takes.
        """
        began = time.monotonic()
        while not self._translated(work.is_completed):
            waited = time.monotonic() - began
            if waited > self.timeout_s:
                raise self._too_late()
            time.sleep(0 if waited < IMPATIENT_S else min(waited / 8, LONGEST_PAUSE_S))
        self._translated(work.wait)  # raises the error, if any: a failed operation counts as completed

    def _too_late(self) -> GroupError:
        return self.failure(f"rank {self.rank} waited {self.timeout_s:g} s for the other ranks")

    def _translated(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RuntimeError, ValueError) as e:  # torch's own: timeouts, closed connections, a destroyed group
            raise self.failure(
                f"rank {self.rank} lost the other ranks: one died, is {self.timeout_s:g} s late, or made another call "
                f"({str(e).splitlines()[0][-160:]})"
            ) from e

    def _check_lengths(self, lengths: Sequence[int], most: int) -> None:
        """Check the lengths that the ranks report, by rank. Raises: GroupError."""
        for rank, length in enumerate(lengths):
            if not 0 <= length <= most:
                raise self.failure(
                    f"the group is out of step: rank {rank} reports {length} bytes, and 0 to {most} are allowed"
                )

    def failure(self, why: str) -> GroupError:
        """Return the error to raise, after making sure that this rank's part in the group has ended."""
        if self._over_gloo:
            self._close_connections()
        elif self._over_nccl:
            self._abort()
        return GroupError(why, rank=self.rank)

    def _close_connections(self) -> None:
        """Close the connections of gloo, so that no other rank waits for this one.

        torch has no call for it: `abort` and `shutdown` do nothing, and a group is destroyed only once its pending
        works have ended. But gloo closes all connections of a group when a receive times out.
        """
        import torch

        devices = os.environ.get("GLOO_SOCKET_IFNAME", "").count(",") + 1  # each has its own connections, chosen by tag
        for tag in range(CLOSING_TAG, CLOSING_TAG + devices):
            for rank in range(self.size):
                with suppress(RuntimeError, ValueError):  # it timed out, or the connection is already closed
                    work = self._dist.irecv(torch.empty(1, dtype=torch.uint8), self._global(rank), self.group, tag)
                    if work is not None:
                        work.wait(timedelta(milliseconds=1))

    def _abort(self) -> None:
        """Abort the communicator of NCCL: its kernels end, and torch's watchdog leaves this group alone."""
        import torch

        group: Any = self.group or self._dist.group.WORLD
        if group is None:
            return  # it was destroyed

        def abort() -> None:
            torch.cuda.set_device(self.device)
            group.abort()

        with suppress(RuntimeError, ValueError, TimeoutError, AttributeError):  # the caller raises the first error
            HelperThread().call(abort, ABORT_S)


def _as_tensor(buffer: ByteBuffer) -> "torch.Tensor":
    """The buffer itself, as a tensor. Raises: ValueError."""
    import torch

    tensor = torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"a buffer must be one-dimensional, contiguous and of bytes; got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}{'' if tensor.is_contiguous() else ', not contiguous'}"
        )
    return tensor


def _copy(target: "torch.Tensor", source: "torch.Tensor") -> None:
    """Copy, and wait until it is done; between pinned memory and a GPU this runs at the speed of the bus."""
    import torch

    target.copy_(source, non_blocking=True)
    for tensor in (source, target):
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
