"""The methods of cluster.py to sync one rank's weights to another where both have them on a GPU.

As in methods.py, a method is an object that both ranks make from the model; rank 0 is the
source, and both call `sync` at the same time. Messages over gloo go through pinned host memory. The baselines are plain
torch: `!=` against a copy that the source keeps on the device, `nonzero`, `index_select`, `index_copy_`. They compare
with kernels of torch and ours with its own, so the stages of both are measured separately: `sync(staged=True)` ends
each stage on the device before the next begins.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.cluster.methods import DensePerTensor, Sent, buckets_of
from benchmarks.harness.device import Model, wait
from pulsesync.group import device_weights
from pulsesync.group.broadcast import Broadcast
from pulsesync.group.messages import SyncTimes

IN_FLIGHT = 3  # buckets that are being sent at a time
BUCKETS, FEWEST, MOST = 32, 1 << 25, 1 << 28  # of index+value bucketed, and weights in each: few launches, much overlap
BUCKET_BYTES = 1 << 26  # of dense bucketed


@dataclass
class Slot:
    """Host memory for one bucket, pinned where the weights are on a GPU, and what still reads or fills it."""

    device: torch.device
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    work: Any = None
    copied: Any = None  # an event: the device has read it

    def room(self, size: int) -> torch.Tensor:
        """A piece of this memory, once nothing reads or fills it any more."""
        self.wait()
        if self.memory.numel() < size:
            pinned = self.device.type == "cuda"
            self.memory = torch.empty(size + size // 8, dtype=torch.uint8, pin_memory=pinned)
        return self.memory[:size]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.copied is not None:
            self.copied.synchronize()
        self.work = self.copied = None

    def upload(self, size: int) -> torch.Tensor:
        """The bytes that have arrived, on the device; the host does not wait for them to get there."""
        self.work.wait()
        self.work = None
        there = self.memory[:size].to(self.device, non_blocking=True, copy=True)
        if self.device.type == "cuda":
            self.copied = torch.cuda.Event()
            self.copied.record()
        return there


def download(slot: Slot, data: torch.Tensor) -> torch.Tensor:
    """Bytes of the device in a slot's memory."""
    room = slot.room(data.numel())
    room.copy_(data, non_blocking=True)
    if data.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return room


class DenseBucketed:
    """Tensors packed on the device into flat buckets; while some travel, others are packed or unpacked."""

    def __init__(self, model: Model, source: bool) -> None:
        first = next(iter(model.values()))
        self.source, self.device = source, first.device
        self.buckets = buckets_of(model, BUCKET_BYTES)
        self.sizes = [sum(piece.numel() for piece in bucket) for bucket in self.buckets]
        self.slots = [Slot(self.device) for _ in range(IN_FLIGHT)]
        self.packed = torch.empty(max(self.sizes), dtype=torch.uint8, device=self.device) if source else None

    def sync(self, staged: bool = False) -> dict[str, Any]:
        sent = Sent()
        (self._push if self.source else self._pull)(sent)
        return {**sent.fields(), "buckets": len(self.buckets)}

    def _push(self, sent: Sent) -> None:
        assert self.packed is not None
        for k, bucket in enumerate(self.buckets):
            slot, packed = self.slots[k % IN_FLIGHT], self.packed[: self.sizes[k]]
            torch.cat(bucket, out=packed)
            slot.work = sent.begin(download(slot, packed))
        for slot in self.slots:
            slot.wait()

    def _pull(self, sent: Sent) -> None:
        def expect(k: int) -> None:
            if k < len(self.buckets):
                slot = self.slots[k % IN_FLIGHT]
                slot.work = sent.begin(slot.room(self.sizes[k]))

        for k in range(IN_FLIGHT - 1):
            expect(k)
        for k, bucket in enumerate(self.buckets):
            expect(k + IN_FLIGHT - 1)
            packed = self.slots[k % IN_FLIGHT].upload(self.sizes[k])
            torch._foreach_copy_(bucket, list(packed.split([piece.numel() for piece in bucket])))
        wait(self.device)


@dataclass
class Chunk:
    """Weights that are compared and sent together: pieces of tensors, one after the other."""

    begin: int  # in the model as one row
    size: int
    pieces: list[torch.Tensor]  # int16, flat


def chunks_of(model: Model, most: int | None) -> Iterator[Chunk]:
    """Cut a model into chunks of `most` weights; without a limit each tensor is a chunk."""
    at, chunk = 0, Chunk(0, 0, [])
    for tensor in model.values():
        rest = tensor.view(-1).view(torch.int16)
        while rest.numel():
            piece = rest[: rest.numel() if most is None else most - chunk.size]
            chunk.pieces.append(piece)
            chunk.size += piece.numel()
            at += piece.numel()
            rest = rest[piece.numel() :]
            if most is None or chunk.size == most:
                yield chunk
                chunk = Chunk(at, 0, [])
    if chunk.size:
        yield chunk


class IndexValue:
    """Where weights changed (int32, in their chunk) and what they are now (BF16), chunk by chunk, after a count.

    Per tensor a chunk is a tensor, and indices and values are messages of their own. Bucketed, chunks have the same
    number of weights and one message each. Chunks are compared, sent and written concurrently.
    """

    def __init__(self, model: Model, source: bool, per_tensor: bool) -> None:
        self.source, self.per_tensor = source, per_tensor
        self.device = next(iter(model.values())).device
        bucket = min(max(sum(tensor.numel() for tensor in model.values()) // BUCKETS, FEWEST), MOST)
        self.chunks = list(chunks_of(model, None if per_tensor else bucket))
        self.slots = [Slot(self.device) for _ in range(IN_FLIGHT)]
        if source:
            self.old = torch.cat([tensor.view(-1).view(torch.int16) for tensor in model.values()])
            most = max(chunk.size for chunk in self.chunks)
            self.differs = torch.empty(most, dtype=torch.bool, device=self.device)

    def sync(self, staged: bool = False) -> dict[str, Any]:
        sent = Sent()
        if self.source:
            (self._push_by_stages if staged else self._push)(sent)
        else:
            (self._pull_by_stages if staged else self._pull)(sent)
        return {**sent.fields(), "buckets": len(self.chunks)}

    # The source

    def _find(self, chunk: Chunk) -> torch.Tensor:
        """What changed in a chunk, as bytes on the device: all indices, then all values. Brings the copy up to date."""
        old, differs = self.old[chunk.begin : chunk.begin + chunk.size], self.differs[: chunk.size]
        sizes = [piece.numel() for piece in chunk.pieces]
        before = old.split(sizes)
        for was, now, found in zip(before, chunk.pieces, differs.split(sizes), strict=True):
            torch.ne(was, now, out=found)
        where = differs.nonzero().view(-1)
        count = where.numel()
        out = torch.empty(6 * count, dtype=torch.uint8, device=self.device)
        indices, values = out[: 4 * count].view(torch.int32), out[4 * count :].view(torch.int16)
        indices.copy_(where)
        if len(chunk.pieces) == 1:
            torch.index_select(chunk.pieces[0], 0, where, out=values)
            old.index_copy_(0, where, values)
        else:  # copies all of it, which is cheaper than to find out on the host which index belongs to which piece
            torch._foreach_copy_(list(before), chunk.pieces)
            torch.index_select(old, 0, where, out=values)
        return out

    def _parts(self, data: torch.Tensor) -> list[torch.Tensor]:
        """The messages of a chunk. A chunk without changes has none."""
        border = data.numel() // 6 * 4
        return [part for part in ([data[:border], data[border:]] if self.per_tensor else [data]) if part.numel()]

    def _send(self, sent: Sent, slot: Slot, size: int) -> None:
        works = [sent.begin(part) for part in self._parts(slot.memory[:size])]
        slot.work = Works(works)

    def _push(self, sent: Sent) -> None:
        for k, chunk in enumerate(self.chunks):
            slot = self.slots[k % IN_FLIGHT]
            data = self._find(chunk)
            download(slot, data)
            counted = sent.begin(torch.tensor([data.numel()]))
            self._send(sent, slot, data.numel())
            slot.work.works.append(counted)
        for slot in self.slots:
            slot.wait()

    def _push_by_stages(self, sent: Sent) -> None:
        with sent.phase("diff_s"):
            found = [self._find(chunk) for chunk in self.chunks]
            wait(self.device)
        for k, data in enumerate(found):
            slot = self.slots[k % IN_FLIGHT]
            slot.wait()
            with sent.phase("staging_s"):
                download(slot, data)
            with sent.phase("wire_s"):
                sent.begin(torch.tensor([data.numel()])).wait()
                self._send(sent, slot, data.numel())
                slot.wait()

    # The receiver

    def _pull(self, sent: Sent) -> None:
        arriving: deque[tuple[Chunk, Slot, int]] = deque()
        number = torch.zeros(1, dtype=torch.int64)
        counted = sent.begin(number)
        for k, chunk in enumerate(self.chunks):
            if len(arriving) == IN_FLIGHT - 1:
                self._write(*arriving.popleft())
            counted.wait()
            slot, size = self.slots[k % IN_FLIGHT], int(number)
            slot.room(size)
            self._send(sent, slot, size)
            if k + 1 < len(self.chunks):
                number = torch.zeros(1, dtype=torch.int64)
                counted = sent.begin(number)
            arriving.append((chunk, slot, size))
        while arriving:
            self._write(*arriving.popleft())
        wait(self.device)

    def _pull_by_stages(self, sent: Sent) -> None:
        number = torch.zeros(1, dtype=torch.int64)
        got = []
        for chunk in self.chunks:
            slot = self.slots[0]
            with sent.phase("wire_s"):
                sent.begin(number).wait()
                slot.room(int(number))
                self._send(sent, slot, int(number))
                slot.work.wait()
            with sent.phase("staging_s"):
                data = slot.upload(int(number))
                wait(self.device)
            got.append((chunk, data, self._borders(chunk, slot.memory, int(number))))
        with sent.phase("apply_s"):
            for chunk, data, borders in got:
                write(chunk, data, borders)
            wait(self.device)

    def _write(self, chunk: Chunk, slot: Slot, size: int) -> None:
        data = slot.upload(size)
        write(chunk, data, self._borders(chunk, slot.memory, size))

    def _borders(self, chunk: Chunk, memory: torch.Tensor, size: int) -> Sequence[int]:
        """Where the changes of each piece end, among those of the chunk."""
        if len(chunk.pieces) == 1:
            return [size // 6]
        indices = memory[: size // 6 * 4].view(torch.int32).numpy()
        ends = np.cumsum([piece.numel() for piece in chunk.pieces])
        return [int(end) for end in np.searchsorted(indices, ends)]


def write(chunk: Chunk, data: torch.Tensor, borders: Sequence[int]) -> None:
    """Write indices and values, as bytes on the device, into the pieces of a chunk."""
    count = data.numel() // 6
    indices, values = data[: 4 * count].view(torch.int32).long(), data[4 * count :].view(torch.int16)
    at = begin = 0
    for piece, end in zip(chunk.pieces, borders, strict=True):
        if end > begin:
            piece.index_copy_(0, indices[begin:end] - at if at else indices[begin:end], values[begin:end])
        at, begin = at + piece.numel(), end


@dataclass
class Works:
    """Several messages that are waited for as one."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


# -- ours ----------------------------------------------------------------------------------------------------------


class TimedBroadcast(Broadcast):
    """Broadcast, which also times the two rounds of control messages in every sync: the meeting, and the verdict."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rounds_s: dict[str, float] = {}

    def _agree(self, *args: Any) -> Any:
        return self._timed("meet_s", super()._agree, *args)

    def _verdict(self, *args: Any) -> Any:
        return self._timed("verdict_s", super()._verdict, *args)

    def _timed(self, name: str, work: Any, *args: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args)
        finally:
            self.rounds_s[name] = time.perf_counter() - began


class Ours:
    """One Broadcast, whose method is set before each sync; its first sync sends all weights."""

    PHASES = ("diff_s", "encode_s", "wire_s", "prepare_s", "undo_s", "digest_s", "apply_s")

    def __init__(self, model: Model, source: bool, timeout_s: float) -> None:
        self.model, self.source = model, source
        self.broadcast = TimedBroadcast(None, 0, timeout_s=timeout_s)

    def sync(self, method: Any, staged: bool = False) -> dict[str, Any]:
        self.broadcast.method = method
        device = next(iter(self.model.values())).device
        none: AbstractContextManager[dict[str, float]] = nullcontext({})
        with ended_stages(device) if staged else none as staging:
            report = self.broadcast.push(self.model) if self.source else self.broadcast.pull_(self.model)
        told: dict[str, Any] = {
            name: getattr(report, name) for name in ("method", "changed", "messages", "sent_bytes", "seconds")
        }
        told |= {name: getattr(report, name) or 0.0 for name in self.PHASES} | self.broadcast.rounds_s
        told["report_s"] = told.pop("seconds")
        return told | staging | {"buckets": self._buckets(report.method)}

    def _buckets(self, method: str) -> int:
        """How many buckets the cost model counts with."""
        weights, most = sum(tensor.numel() for tensor in self.model.values()), self.broadcast.costs.bucket_weights
        by_method: dict[str, int] = {str(name): count for name, count in most.items()}
        return max(1, -(-weights // by_method.get("dense" if method == "full" else method, max(by_method.values()))))


@contextmanager
def ended_stages(device: torch.device) -> Iterator[dict[str, float]]:
    """Have every stage of a Broadcast end on the device before its time is taken and before the next begins.

    The library takes the host's time, in which a stage also waits for the work that the previous stage has launched.
    Yields the part of a receiver's `prepare_s` that is spent on copies from pinned memory to the device, which messages
    over NCCL do not need.
    """
    staging, bring = {"staging_s": 0.0}, device_weights._bring

    @contextmanager
    def timed(self: SyncTimes, what: str) -> Iterator[None]:
        wait(device)
        began = time.perf_counter()
        try:
            yield
        finally:
            wait(device)
            self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - began

    def timed_bring(message: Any, there: torch.device) -> torch.Tensor:
        wait(device)
        began = time.perf_counter()
        brought = bring(message, there)
        wait(device)
        staging["staging_s"] += time.perf_counter() - began
        return brought

    with mock.patch.object(SyncTimes, "timed", timed), mock.patch.object(device_weights, "_bring", timed_bring):
        yield staging


def make(way: str, model: Model, source: bool, timeout_s: float) -> Any:
    if way == "ours":
        return Ours(model, source, timeout_s)
    if way.startswith("index+value"):
        return IndexValue(model, source, way == "index+value per tensor")
    return {"dense per tensor": DensePerTensor, "dense bucketed": DenseBucketed}[way](model, source)
