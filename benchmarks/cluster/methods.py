"""The methods of cluster.py to sync one rank's weights to another: four that others use, and ours.

A method is an object that both ranks make from the model, {name: BF16 tensor}; rank 0 is the
source. Both call `sync` at the same time, and then the receiver has the source's weights. Counted are the bytes that a
method passes to torch for one receiver, and its calls. All methods find changes with the same kernel, so that methods
are compared and not kernels.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from pulsesync import kernels
from pulsesync.core import digest
from pulsesync.core.threads import spread
from pulsesync.core.types import Sum
from pulsesync.format import patch
from pulsesync.group import bundles
from pulsesync.group.broadcast import Broadcast

Model = dict[str, torch.Tensor]
SMALL = 1 << 16  # weights: tensors below this are gathered before they are compared, above it they are not copied
BLOCK = 1 << 20  # weights that one thread compares at a time: as ours


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def as_bits(tensor: torch.Tensor) -> Any:
    """A tensor's bits as numpy array, over the same memory."""
    return tensor.view(-1).view(torch.int16).numpy().view(np.uint16)


class Sent:
    """The figures of one sync: messages, bytes and seconds by phase."""

    def __init__(self) -> None:
        self.messages = self.sent_bytes = 0
        self.phases: dict[str, float] = {}

    def begin(self, data: torch.Tensor) -> Any:
        """Broadcast bytes from rank 0; return a handle to wait for."""
        self.messages += 1
        self.sent_bytes += data.nbytes
        return dist.broadcast(data, 0, async_op=True)

    def carry(self, data: Any) -> None:
        """Broadcast a tensor or an array, and wait for it. If it is empty, nothing is sent."""
        raw = as_bytes(data) if isinstance(data, torch.Tensor) else torch.from_numpy(data.view(np.uint8))
        if raw.numel():
            self.begin(raw).wait()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    def fields(self) -> dict[str, Any]:
        return {"messages": self.messages, "sent_bytes": self.sent_bytes, **self.phases}


class Method(Protocol):
    """A method to sync, which is set up once on both ranks."""

    def sync(self) -> dict[str, Any]: ...


# -- whole tensors -------------------------------------------------------------------------------------------------


def buckets_of(model: Model, bucket_bytes: int) -> list[list[torch.Tensor]]:
    """Cut the bytes of a model into buckets of this size."""
    buckets: list[list[torch.Tensor]] = [[]]
    room = bucket_bytes
    for tensor in model.values():
        rest = as_bytes(tensor)
        while rest.numel():
            if not room:
                buckets.append([])
                room = bucket_bytes
            piece, rest = rest[:room], rest[room:]
            buckets[-1].append(piece)
            room -= piece.numel()
    return buckets


class DensePerTensor:
    """A broadcast for every tensor; torch's gloo brings tensors of a GPU through pinned memory by itself."""

    def __init__(self, model: Model, source: bool, bucket_bytes: int = 0) -> None:
        self.tensors = list(model.values())

    def sync(self, staged: bool = False) -> dict[str, Any]:
        sent = Sent()
        with sent.phase("wire_s"):
            for tensor in self.tensors:
                sent.carry(tensor)
        return sent.fields()


class DenseBucketed:
    """Tensors gathered into flat buckets; one is copied in and out while another one travels."""

    def __init__(self, model: Model, source: bool, bucket_bytes: int) -> None:
        self.source = source
        self.buckets = buckets_of(model, bucket_bytes)
        self.sizes = [sum(piece.numel() for piece in bucket) for bucket in self.buckets]
        self.buffers = [torch.empty(max(self.sizes), dtype=torch.uint8) for _ in range(2)]

    def sync(self) -> dict[str, Any]:
        sent = Sent()
        (self._push if self.source else self._pull)(sent)
        return sent.fields()

    def _buffer(self, k: int) -> torch.Tensor:
        return self.buffers[k % 2][: self.sizes[k]]

    def _push(self, sent: Sent) -> None:
        works: list[Any] = []
        for k, bucket in enumerate(self.buckets):
            if k > 1:
                works[k - 2].wait()
            with sent.phase("copy_s"):
                torch.cat(bucket, out=self._buffer(k))
            works.append(sent.begin(self._buffer(k)))
        for work in works[-2:]:
            work.wait()

    def _pull(self, sent: Sent) -> None:
        works = [sent.begin(self._buffer(0))]
        for k, bucket in enumerate(self.buckets):
            if k + 1 < len(self.buckets):
                works.append(sent.begin(self._buffer(k + 1)))
            works[k].wait()
            with sent.phase("copy_s"):
                torch._foreach_copy_(bucket, list(self._buffer(k).split([piece.numel() for piece in bucket])))


# -- index and value -----------------------------------------------------------------------------------------------


class IndexValuePerTensor:
    """For every tensor: how many weights changed, where (int32), and what they are now."""

    def __init__(self, model: Model, source: bool, bucket_bytes: int) -> None:
        self.source = source
        self.now = [as_bits(tensor) for tensor in model.values()]
        self.old = [bits.copy() for bits in self.now] if source else []

    def sync(self) -> dict[str, Any]:
        sent = Sent()
        (self._push if self.source else self._pull)(sent)
        return sent.fields()

    def _push(self, sent: Sent) -> None:
        changed = kernels.active().changed
        for old, now in zip(self.old, self.now, strict=True):
            positions, _, values = changed(old, now)
            old[positions] = values
            sent.carry(np.array([positions.size], np.int64))
            sent.carry(positions)
            sent.carry(values)

    def _pull(self, sent: Sent) -> None:
        count = np.zeros(1, np.int64)
        for now in self.now:
            sent.carry(count)
            positions, values = np.empty(count[0], np.int32), np.empty(count[0], np.uint16)
            sent.carry(positions)
            sent.carry(values)
            now[positions] = values


class IndexValueBucketed:
    """One count, then the indices (int32, into the model as one row) and values of all changes, in buckets."""

    def __init__(self, model: Model, source: bool, bucket_bytes: int) -> None:
        self.source = source
        self.tensors = [tensor.view(-1).view(torch.int16) for tensor in model.values()]
        self.now = [as_bits(tensor) for tensor in model.values()]
        self.ends = np.cumsum([bits.size for bits in self.now])
        assert self.ends[-1] < 1 << 31, "int32 indices reach 2^31 weights"
        self.per_bucket = bucket_bytes // 6
        if source:
            self.old = np.concatenate(self.now)
            self.runs = list(self._runs())

    def _runs(self) -> Iterator[tuple[int, Any, Sequence[torch.Tensor]]]:
        """Yield (where it begins, weights to compare, small tensors to gather into them first)."""
        few: list[torch.Tensor] = []
        for end, tensor in zip(self.ends, self.tensors, strict=True):
            size = tensor.numel()
            if few and (size >= SMALL or sum(map(len, few)) + size > BLOCK):
                yield self._gathered(int(end) - size, few)
                few = []
            if size < SMALL:
                few.append(tensor)
                continue
            bits = as_bits(tensor)
            for at in range(0, size, BLOCK):
                yield int(end) - size + at, bits[at : at + BLOCK], ()
        if few:
            yield self._gathered(int(self.ends[-1]), few)

    def _gathered(self, end: int, few: list[torch.Tensor]) -> tuple[int, Any, Sequence[torch.Tensor]]:
        size = sum(map(len, few))
        return end - size, np.empty(size, np.uint16), few

    def sync(self) -> dict[str, Any]:
        sent = Sent()
        (self._push if self.source else self._pull)(sent)
        return sent.fields()

    def _compare(self, run: tuple[int, Any, Sequence[torch.Tensor]]) -> tuple[Any, Any]:
        at, now, few = run
        if few:
            torch.cat(list(few), out=torch.from_numpy(now.view(np.int16)))
        old = self.old[at : at + now.size]
        positions, _, values = kernels.active().changed(old, now)
        old[positions] = values
        positions += np.uint32(at)
        return positions, values

    def _push(self, sent: Sent) -> None:
        with sent.phase("diff_s"):
            found = spread(self._compare, self.runs)
            positions = np.concatenate([one for one, _ in found])
            values = np.concatenate([one for _, one in found])
        with sent.phase("wire_s"):
            sent.carry(np.array([positions.size], np.int64))
            works = []
            for at in range(0, positions.size, self.per_bucket):
                for whole in (positions, values):
                    raw = whole[at : at + self.per_bucket].view(np.uint8)
                    works.append(sent.begin(torch.from_numpy(raw)))
            for work in works:
                work.wait()

    def _pull(self, sent: Sent) -> None:
        count = np.zeros(1, np.int64)
        with sent.phase("wire_s"):
            sent.carry(count)
        positions, values = np.empty(count[0], np.int32), np.empty(count[0], np.uint16)
        works = []
        for at in range(0, positions.size, self.per_bucket):
            here = slice(at, at + self.per_bucket)
            pair = [sent.begin(torch.from_numpy(whole[here].view(np.uint8))) for whole in (positions, values)]
            works.append((here, pair))
        for here, pair in works:
            with sent.phase("wire_s"):
                for work in pair:
                    work.wait()
            with sent.phase("apply_s"):
                self._apply(positions[here], values[here])

    def _apply(self, positions: Any, values: Any) -> None:
        borders = np.searchsorted(positions, self.ends).tolist()
        starts, begin = [0, *self.ends[:-1].tolist()], 0
        for now, start, end in zip(self.now, starts, borders, strict=True):
            if end > begin:
                now[positions[begin:end] - start] = values[begin:end]
            begin = end


# -- ours ----------------------------------------------------------------------------------------------------------


class Ours:
    """Broadcast, with an automatic or a fixed method; or "bare", without its checks, to measure what they cost."""

    def __init__(self, model: Model, source: bool, method: str) -> None:
        self.model, self.source, self.bare = model, source, method == "bare"
        self.broadcast = Broadcast(None, 0, method="auto" if self.bare else method)  # type: ignore[arg-type]

    def sync(self) -> dict[str, Any]:
        with without_checks() if self.bare else nullcontext():
            return self._sync()

    def _sync(self) -> dict[str, Any]:
        report = self.broadcast.push(self.model) if self.source else self.broadcast.pull_(self.model)
        told = {name: getattr(report, name, None) for name in ("method", "changed", "messages", "sent_bytes")}
        phases = ("diff_s", "encode_s", "wire_s", "prepare_s", "undo_s", "digest_s", "apply_s")
        return told | {name: getattr(report, name, 0.0) or 0.0 for name in phases}


@contextmanager
def without_checks() -> Iterator[None]:
    """Disable digests and the undo log of the library in this process; both ranks must do it."""
    nothing = Sum(0, 0)
    swaps: tuple[tuple[Any, str, Any], ...] = (
        (digest, "moved", lambda *_: nothing),
        (patch, "moved", lambda *_: nothing),
        (digest, "count_block", lambda *_: nothing),
        (bundles, "pick", lambda _, __, ___, positions: np.zeros(positions.size, np.uint16)),
    )
    with ExitStack() as stack:
        for owner, name, swap in swaps:
            stack.enter_context(mock.patch.object(owner, name, swap))
        yield


BASELINES: dict[str, Any] = {
    "dense per tensor": DensePerTensor,
    "dense bucketed": DenseBucketed,
    "index+value per tensor": IndexValuePerTensor,
    "index+value bucketed": IndexValueBucketed,
}
OURS = {"ours": "auto"} | {f"ours, {method}": method for method in ("dense", "plain", "gap", "coded")}
OURS["without digest and undo"] = "bare"
