"""What only size shows: tensors beyond 2^31 weights, and thousands of small ones in few launches."""

from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.core import digest
from pulsesync.core.types import Sum, TensorSpec
from pulsesync.device.baseline import DeviceBaseline
from pulsesync.device.memory import DeviceView, to_device
from pulsesync.device.source import DeviceSource
from pulsesync.device.state import DeviceBackend
from pulsesync.format import layout as layouts
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import BaseRef, Manifest, PartRef
from pulsesync.format.patch import EncodedPart
from pulsesync.kernels import cuda, reference
from pulsesync.state.backend import Transition
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.weights import Recount, WeightState
from tests.device.pairs import Pair, all_of, place, small, to_flats, trained
from tests.helpers import RUN


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, launches: list[str], name: str) -> None:
        self._kernel, self._launches, self._name = kernel, launches, name

    def __getitem__(self, grid: Any) -> Any:
        self._launches.append(self._name)
        return self._kernel[grid]


def count_launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    launches: list[str] = []
    for name, kernel in list(vars(cuda).items()):
        if hasattr(kernel, "run") and not name.startswith("_"):
            monkeypatch.setattr(cuda, name, Counted(kernel, launches, name))
    return launches


def launches_for(tensors: int, device: str, launches: list[str]) -> list[str]:
    """The kernels that are launched to compare, encode, decode and apply a version of this many small tensors."""
    layout, state = small(1, tuple(TensorSpec(f"t{i:04}", "BF16", (40,)) for i in range(tensors)))
    pair = Pair(layout, state, device, "history")
    worker = WeightState(DeviceBackend(layout, to_flats(state, device)))
    new = trained(layout, state, 1, 0.3)
    launches.clear()
    record, data = pair.advance(new)
    worker.commit(PatchTransaction(worker).prepare(record, [data]))
    assert worker.digest == record.digest
    return list(launches)


def assert_few(many: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    few = launches_for(2, device, launches)
    assert {"compare", "collect", "encode", "decode", "land", "apply"} <= set(few)
    assert sorted(launches_for(many, device, launches)) == sorted(few)


def test_more_tensors_take_no_more_launches(device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_few(3, device, monkeypatch)


@pytest.mark.gpu
def test_thousands_of_tensors_take_no_more_launches(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_few(2000, device, monkeypatch)


# Beyond 2^31 weights

SIZE = (1 << 31) + 3 * (1 << 20) + 4099


def record_of(layout: Layout, base: str | None, part: EncodedPart | None, after: Any) -> Manifest:
    """The record of a patch, or of the root it starts from."""
    refs = (PartRef(part.id, len(part.data)),) if part else ()
    return Manifest(
        run=RUN,
        version=int(base is not None),
        step=0,
        epoch=0,
        index=int(base is not None),
        base=BaseRef(0, base) if base else None,
        layout=layout.id,
        parts=refs,
        digest=digest.state_digest(layout.tables, after.sums.values()),
        created=0,
        history=after.history.digest() if after.history.tiles else None,
    )


def sum_by_torch(spec: TensorSpec, bytes_: torch.Tensor) -> Sum:
    """The digest of a tensor of single bytes, in int64 arithmetic, which wraps as it should."""
    totals = [0, 0]
    step = 1 << 26
    for word in (0, 1):
        keys = to_device(digest.keys()[word].astype(np.int64), bytes_.device)
        for begin in range(0, bytes_.numel(), step):
            some = bytes_[begin : begin + step].to(torch.int64)
            some = torch.nn.functional.pad(some, (0, -some.numel() % 4096)).view(-1, 4096)
            first = begin // 4096
            chunks = np.arange(first, first + some.shape[0], dtype=np.uint64) + np.uint64(spec.digest_offset)
            by_chunk = to_device(reference._chunk_keys(chunks, word).view(np.int64), bytes_.device)
            totals[word] += int(((some * keys).sum(dim=1) * by_chunk).sum())
    return Sum(*(total & 0xFFFFFFFFFFFFFFFF for total in totals))


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["context", "gap"])
def test_a_tensor_of_more_than_two_to_the_31_weights(codec: Any, device: str) -> None:
    where = place(device)
    layout = layouts.make([TensorSpec("a", "F8_E4M3", (SIZE,))])
    old = torch.full((SIZE,), 0x68, dtype=torch.uint8, device=where)
    old[::64] = 0x21
    generator = torch.Generator(device=where).manual_seed(1)
    hot = 64 * torch.randint(0, SIZE // 64, (200_000,), device=where, generator=generator)
    cold = torch.tensor([1, (1 << 31) - 1, (1 << 31) + 1, SIZE - 2, SIZE - 1], device=where)
    changed = torch.unique(torch.cat((hot, cold)))
    new = old.clone()
    new[changed] += 1
    state = WeightState(DeviceBackend(layout, {"a": old.clone()}, device=where))
    assert state.sums[0] == sum_by_torch(layout.tensors[0], old)
    share, shards = all_of(layout, DeviceSource({"a": DeviceView(layout.tensors[0], new)}, {}))
    root = record_of(layout, None, None, state)
    found = DeviceBaseline(where, "device").compare(share, state, shards, codec)
    (run,) = found.runs
    assert torch.equal(run.flat_keys(), changed)
    assert torch.equal(run.old, old[changed])
    assert torch.equal(run.new, new[changed])
    part, after = found.encode(root, codec)
    assert isinstance(after, Transition)
    assert after.sums[0] == sum_by_torch(layout.tensors[0], new)
    record = record_of(layout, state.digest, part, after)
    worker = WeightState(DeviceBackend(layout, {"a": old.clone()}, device=where))
    back = worker.commit(PatchTransaction(worker).prepare(record, [part.data]))
    assert torch.equal(worker.flats["a"], new)
    assert Recount(worker).digest() == record.digest
    worker.commit(back)
    assert torch.equal(worker.flats["a"], old)
