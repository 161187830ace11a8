"""The ends of a group with weights on a device: the messages of the host byte for byte, and the same verdicts."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.core import digest
from pulsesync.core.types import BLOCK, Bits
from pulsesync.errors import FormatError, StateError, VerificationError
from pulsesync.group import bundles, device_weights
from pulsesync.group.bundles import agree, describe_shards
from pulsesync.group.cost_model import METHODS, CostModel, Method
from pulsesync.group.messages import TRAILER, Bucket, SyncTimes, Table
from pulsesync.group.peers import LocalModel, RankVersion, ReceiverEnd, SourceEnd
from pulsesync.kernels import cuda
from pulsesync.state.sharding import Placed, tensor_parallel
from tests.backends import host_as_device
from tests.tiers import slow

Model = dict[str, torch.Tensor]
TABLES: list[Method] = ["dense", "plain"]


@pytest.fixture(autouse=True)
def small_scale(monkeypatch: pytest.MonkeyPatch, many_lanes: None) -> None:
    """Tensors of three hundred weights are a bundle each, as those of a real model are."""
    monkeypatch.setattr(bundles, "SMALL", 300)


def random_model(seed: int = 0) -> Model:
    """Tensors that are a bundle each, small ones that share some, and dtypes that are not coded."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy((0.02 * rng.standard_normal(shape)).astype(np.float32))

    return {
        "large": normal(20, 20).bfloat16(),
        **{f"small.{n}": normal(60 + n).bfloat16() for n in range(4)},
        "float": normal(33),
        "odd": torch.from_numpy(rng.integers(0, 256, 7, np.uint8)),
        "long": torch.from_numpy(rng.integers(0, 9, 5)),
    }


def changed(model: Mapping[str, torch.Tensor], seed: int, share: float = 0.03) -> Model:
    rng, out = np.random.default_rng(seed), {name: tensor.clone() for name, tensor in model.items()}
    for tensor in out.values():
        flat = tensor.view(-1).view(torch.uint8)
        at = torch.from_numpy(np.flatnonzero(rng.random(flat.numel()) < share))
        flat[at] ^= 1
    return out


@contextmanager
def memory(where: str, device: str) -> Iterator[str]:
    """Have tensors on the device, or in host memory: what `.to` takes."""
    with host_as_device(where == "device"):
        yield device if where == "device" else "cpu"


def local(model: Mapping[str, Any], where: str, device: str, cast: Mapping[str, str] | None = None) -> LocalModel:
    moved: dict[int, torch.Tensor] = {}  # what is tied stays so

    def there(value: Any) -> Any:
        if isinstance(value, Placed):
            return Placed(value.tensor.to(place), value.shape, value.rows, value.columns)
        return moved.setdefault(id(value), value.to(place))

    with memory(where, device) as place:
        return LocalModel.of({name: there(value) for name, value in model.items()}, cast, ())


def bytes_of(message: Any) -> Bits:
    """A message without its trailer, on the host."""
    found = message if isinstance(message, np.ndarray) else message.cpu().numpy()
    return found[:-TRAILER].copy()


class Joined:
    """A source and a receiver that have joined and have the same weights, each in memory of one kind."""

    def __init__(
        self,
        model: Mapping[str, Any],
        receives: Mapping[str, Any],
        memories: tuple[str, str],
        device: str,
        other: Mapping[str, Any] | None = None,  # of a receiver that only takes part in the join
    ) -> None:
        self.where, self.device = memories, device
        others = [local(other, "host", device)] if other else []
        source, receiver = (local(m, w, device) for m, w in zip((model, receives), memories, strict=True))
        self.wire = agree([describe_shards(one.shards) for one in (source, receiver, *others)], [0])
        self.tiles = self.wire.layout.tiles
        self.source = SourceEnd(self.wire, self.wire.owned_by(0), source)
        self.receiver = ReceiverEnd(self.wire, self.wire.local_to(1), receiver)
        self.received = receiver
        self.at = RankVersion(0, "", {})
        self.commit(*self.carry("dense"))

    def update_tensors(self, model: Mapping[str, Any]) -> None:
        """The source has these weights now."""
        self.source.attach(local(model, self.where[0], self.device).shards)

    def carry(self, method: Method) -> tuple[Bucket, Bucket]:
        """Make a message, and read it as it arrives in pinned memory, or on the device."""
        for end in (self.source, self.receiver):
            end.weights.begin()
        self.source.weights.make_room()
        bucket = self.source.weights.encode(self.source.tiles, method, SyncTimes())
        assert bucket is not None
        return bucket, self.read(bucket.message)

    def read(self, message: Any) -> Bucket:
        if self.device == "cuda":
            torch.cuda.synchronize()  # a message that has arrived is there, whichever stream reads it
        if self.where[1] == "host" and not isinstance(message, np.ndarray):
            message = message.cpu().numpy()
        return self.receiver.weights.read(message, self.at.sums, SyncTimes())

    def commit(self, sent: Bucket, got: Bucket) -> None:
        assert sent.sums == got.sums
        sums = {**self.at.sums, **got.sums}
        self.at = RankVersion(self.at.version + 1, digest.state_digest(self.wire.layout.tables, sums.values()), sums)
        self.source.commit([sent], self.at)
        self.receiver.commit([got], self.at)

    def weights(self) -> Model:
        """The receiver's, by name, on the host."""
        views = self.received.shards.published.views
        return {name: _bits(view.flat) for name, view in views.items()}


def _bits(flat: Any) -> torch.Tensor:
    tensor = (
        torch.from_numpy(flat.view(f"i{flat.itemsize}" if flat.itemsize > 1 else "u1").copy())
        if isinstance(flat, np.ndarray)
        else flat.cpu().clone()
    )
    return tensor.view(torch.uint8)


def same(got: Model, sent: Model) -> bool:
    return all(torch.equal(got[name], tensor.contiguous().view(-1).view(torch.uint8)) for name, tensor in sent.items())


BOTH = [("device", "device"), ("device", "host"), ("host", "device")]


@pytest.mark.parametrize("method", METHODS)
def test_messages_are_byte_for_byte_those_of_the_host(method: Method, device: str) -> None:
    old = random_model()
    new = changed(old, 1)
    found = []
    for where in ("host", "device"):
        pair = Joined(old, old, (where, "host"), device)
        pair.update_tensors(new)
        found.append(bytes_of(pair.carry(method)[0].message))
    assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize(
    ("method", "memories"),
    [
        pytest.param(method, memories, marks=[pytest.mark.slow] * (memories != BOTH[0] or method in TABLES))
        for method in METHODS
        for memories in BOTH
    ],
)
def test_a_receiver_gets_every_bit_and_can_return(method: Method, memories: tuple[str, str], device: str) -> None:
    old = random_model()
    pair = Joined(old, {name: torch.zeros_like(tensor) for name, tensor in old.items()}, memories, device)
    assert same(pair.weights(), old)
    first, new = pair.at, changed(old, 1)
    pair.update_tensors(new)
    pair.commit(*pair.carry(method))
    assert same(pair.weights(), new)
    pair.receiver.verify(pair.at)
    if method == "dense":
        return
    for end in (pair.source, pair.receiver):
        end.reach(first.name)
    assert same(pair.weights(), old)
    pair.at = first
    pair.commit(*pair.carry("plain"))
    assert same(pair.weights(), new)


@pytest.mark.parametrize("method", [slow("dense"), "plain"])
def test_a_message_that_comes_on_the_device_is_read_there(method: Method, device: str) -> None:
    """The message arrives in device memory, as over NCCL. Coded parts, in the next test, are copied to the host."""
    old = random_model()
    pair = Joined(old, old, ("device", "device"), device)
    new = changed(old, 2)
    pair.update_tensors(new)
    sent, _ = pair.carry(method)
    pair.commit(sent, pair.read(torch.as_tensor(sent.message).clone()))
    assert same(pair.weights(), new)


def test_a_part_that_comes_on_the_device_is_read_from_the_host(device: str) -> None:
    old = random_model()
    pair = Joined(old, old, ("device", "device"), device)
    new = changed(old, 2)
    pair.update_tensors(new)
    sent, _ = pair.carry("gap")
    pair.commit(sent, pair.read(torch.from_numpy(sent.message).to(device)))
    assert same(pair.weights(), new)


@pytest.mark.parametrize(("method", "places"), [("dense", 5), *(slow(method, 12) for method in TABLES)])
def test_no_changed_byte_gets_through(method: Method, places: int, device: str) -> None:
    old = random_model()
    pair = Joined(old, old, ("device", "device"), device)
    pair.update_tensors(changed(old, 3))
    sent, _ = pair.carry(method)
    message = bytes_of(sent.message)
    table, _ = Table.open(message, message.size + TRAILER, pair.wire)
    gaps = [n for gap in table.gaps for n in range(gap.start, gap.stop)]
    for at in np.random.default_rng(0).choice(message.size, places, replace=False).tolist():
        damaged = np.append(message, np.zeros(TRAILER, np.uint8))
        damaged[at] ^= 1 << (at % 8)
        if at in gaps:
            continue
        with pytest.raises((FormatError, VerificationError)):
            pair.read(damaged)
    assert same(pair.weights(), old)


@pytest.mark.parametrize("places", [[5, 3], [3, 3], [0, 1 << 31], [399, 400]])
def test_changes_out_of_order_or_outside_their_tile_are_refused(places: list[int], device: str) -> None:
    old = {"large": random_model()["large"]}
    pair = Joined(old, old, ("device", "device"), device)
    new = {"large": old["large"].clone()}
    new["large"].view(-1)[[3, 5]] += 1
    pair.update_tensors(new)
    sent, _ = pair.carry("plain")
    message = np.append(bytes_of(sent.message), np.zeros(TRAILER, np.uint8))
    message[48:56] = np.array(places, np.uint32).view(np.uint8)
    with pytest.raises(FormatError, match="not in ascending order"):
        pair.read(message)


def test_tensor_parallel_receivers_get_their_columns_from_a_source_that_has_all(device: str) -> None:
    old = {"up": random_model()["large"], "norm": torch.ones(20).bfloat16()}
    new = changed(old, 4)
    ways: tuple[tuple[Method, ...], ...] = (("dense", "coded"), ("plain",))
    for rank, methods in enumerate(ways):
        mine = {"up": torch.zeros(20, 10).bfloat16(), "norm": torch.zeros(20).bfloat16()}
        received = tensor_parallel(mine, rank, 2, columns=["up"])
        other = tensor_parallel(mine, 1 - rank, 2, columns=["up"])
        for method in methods:
            pair = Joined(old, received, ("device", "device"), device, other)
            pair.update_tensors(new)
            pair.commit(*pair.carry(method))
            expected = new["up"][:, 10 * rank : 10 * rank + 10].contiguous()
            assert torch.equal(pair.weights()["up"], expected.view(-1).view(torch.uint8)), method


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_masters_are_sent_as_the_dtype_that_receivers_have(dtype: str, device: str) -> None:
    rng = np.random.default_rng(0)
    masters = {
        f"m{n}": torch.from_numpy(0.02 * rng.standard_normal(size).astype(np.float32))
        for n, size in enumerate((400, 90))
    }
    kept = masters | {"plain": torch.zeros(350, dtype=getattr(torch, {"BF16": "bfloat16", "F16": "float16"}[dtype]))}
    found = []
    for where in ("host", "device"):
        source = local(kept, where, device, {"*": dtype})
        wire = agree([describe_shards(source.shards), describe_shards(source.shards)], [0])
        end = SourceEnd(wire, wire.owned_by(0), source)
        end.weights.begin()
        end.weights.make_room()
        first = end.weights.encode(end.tiles, "dense", SyncTimes())
        assert first is not None
        end.commit([first], RankVersion(1, "", first.sums))
        later = local({name: tensor * 1.01 for name, tensor in kept.items()}, where, device, {"*": dtype})
        end.attach(later.shards)
        second = end.weights.encode(end.tiles, "plain", SyncTimes())
        assert second is not None
        found.append((bytes_of(first.message), bytes_of(second.message)))
    assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


def test_a_bundle_that_is_larger_than_a_block_is_written_where_it_belongs(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of it is in two blocks. It takes the interpreter a second or two: a block has 2^20 weights."""
    monkeypatch.setattr(bundles, "SMALL", BLOCK)
    old = {name: torch.zeros(BLOCK // 2 + more, dtype=torch.int16) for name, more in (("a", -80), ("b", 300))}
    pair = Joined(old, old, ("device", "device"), device)
    assert [len(pieces) for pieces in pair.wire.pieces] == [2]
    assert pair.tiles[0].block_count == 2
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["a"][[0, -1]] = 1
    border = BLOCK // 2 + 80  # the first of "b" that is in the second block
    new["b"][[0, border - 1, border, -1]] = 2
    pair.update_tensors(new)
    pair.commit(*pair.carry("plain"))
    assert same(pair.weights(), new)


def test_tied_tensors_with_memory_of_their_own_are_written_too(device: str) -> None:
    base = random_model()["large"]
    tied = {"embed": base, "head": base}
    apart = {"embed": torch.zeros_like(base), "head": torch.zeros_like(base)}
    source, receiver = local(tied, "device", device), local(apart, "device", device)
    assert source.shards.ties == {"head": "embed"}
    wire = agree([describe_shards(source.shards), describe_shards(receiver.shards)], [0])
    send, receive = SourceEnd(wire, wire.owned_by(0), source), ReceiverEnd(wire, wire.local_to(1), receiver)
    sums: dict[int, Any] = {}
    for number, method in enumerate(TABLES):
        send.weights.make_room()
        bucket = send.weights.encode(send.tiles, method, SyncTimes())
        assert bucket is not None
        got = receive.weights.read(bucket.message, sums, SyncTimes())
        sums = {**sums, **bucket.sums}
        send.commit([bucket], RankVersion(number, "", sums))
        receive.commit([got], RankVersion(number, "", sums))
        for view in receiver.shards.published.views.values():
            assert torch.equal(view.flat.cpu(), source.shards.published.views["embed"].flat.cpu())
        source.shards.published.views["embed"].flat[7] += 1
    receive.verify(RankVersion(1, "", sums))
    receiver.shards.published.views["head"].flat[3] += 1
    with pytest.raises(VerificationError, match="something else wrote them"):
        receive.verify(RankVersion(1, "", sums))


def test_a_source_that_always_sends_all_keeps_no_copy(device: str) -> None:
    model = local(random_model(), "device", device)
    wire = agree([describe_shards(model.shards)] * 2, [0])
    end = SourceEnd(wire, wire.owned_by(0), model)
    jobs, name = end.plan("dense", CostModel())
    assert name == "dense"
    made = [bucket for method, tiles in jobs if (bucket := end.weights.encode(tiles, method, SyncTimes()))]
    end.commit([end.sent(bucket) for bucket in made], RankVersion(1, "", made[0].sums))
    assert isinstance(end.weights, device_weights.DeviceSourceWeights)
    assert end.weights.bundles.base is None


def test_a_copy_that_is_not_needed_any_more_gives_its_memory_back(device: str) -> None:
    old = random_model()
    pair = Joined(old, old, ("device", "host"), device)
    pair.update_tensors(changed(old, 1))
    pair.carry("plain")
    assert isinstance(pair.source.weights, device_weights.DeviceSourceWeights)
    kept = pair.source.weights.bundles
    assert kept.base is not None
    views = [weakref.ref(view) for view in (*kept.base.flats.values(), *(room for room, _ in kept._rooms.values()))]
    assert all(view() is not None for view in views)
    pair.source.plan("dense", CostModel())
    pair.source.commit([], RankVersion(2, "", pair.at.sums))
    gc.collect()
    assert [view for view in views if view() is not None] == []


def test_weights_that_something_writes_during_a_push_are_not_taken_for_what_was_sent(device: str) -> None:
    old = random_model()
    pair = Joined(old, old, ("device", "device"), device)
    pair.update_tensors(changed(old, 1))
    sent, got = pair.carry("dense")
    pair.source.shards.published.views["large"].flat[3] += 1  # after it was encoded
    with pytest.raises(StateError, match="weights changed while"):
        pair.commit(sent, got)
    assert (pair.source.at, pair.source.has_weights) == (None, False)
    assert pair.source.plan("plain", CostModel())[1] == "full"


def test_a_source_that_owns_no_bundle_takes_part(device: str) -> None:
    model = local(random_model(), "device", device)
    wire = agree([describe_shards(model.shards)] * 3, [0, 1])
    end = SourceEnd(wire, wire.owned_by(1), model)
    assert not end.tiles
    for version in (1, 2):
        end.plan("auto", CostModel())
        end.commit([], RankVersion(version, "", {}))
        assert end.has_weights


def test_a_sample_tells_how_much_has_changed(device: str) -> None:
    old = random_model()
    pair = Joined(old, old, ("device", "host"), device)
    for share in (0.0, 0.05, 1.0):
        new = {name: tensor.clone() for name, tensor in old.items()}
        for tensor in new.values():
            flat = tensor.view(-1)
            flat[: round(share * flat.numel())] += 1
        pair.update_tensors(new)
        for load in pair.source.sample(0):
            assert load.changed == pytest.approx(share * load.weights, abs=3), share


def test_what_methods_take_follows_the_speed_of_the_devices_memory(device: str) -> None:
    model = local(random_model(), "device", device)
    wire = agree([describe_shards(model.shards)] * 2, [0])
    costs, mixed = CostModel(), CostModel()
    SourceEnd(wire, wire.owned_by(0), model).calibrate(costs, receivers_on_gpu=True)
    SourceEnd(wire, wire.owned_by(0), model).calibrate(mixed, receivers_on_gpu=False)
    for method in METHODS:
        assert costs.methods[method].source.per_bucket == mixed.methods[method].source.per_bucket > 0
        assert mixed.methods[method].source != CostModel().methods[method].source
        assert costs.methods[method].receiver != mixed.methods[method].receiver
        assert mixed.methods[method].receiver == CostModel().methods[method].receiver
    assert costs.bucket_weights["coded"] > costs.bucket_weights["dense"] > 1 << 24


@contextmanager
def launches() -> Iterator[list[str]]:
    """The kernels that are launched inside the block."""
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patched:
        for name in cuda.__all__:
            patched.setattr(cuda, name, _Counted(getattr(cuda, name), name, found))
        yield found


class _Counted:
    def __init__(self, kernel: Any, name: str, found: list[str]) -> None:
        self._kernel, self._name, self._found = kernel, name, found

    def __getitem__(self, grid: Any) -> Any:
        self._found.append(self._name)
        return self._kernel[grid]


@pytest.mark.parametrize("method", ["coded", *(slow(method) for method in ("plain", "gap", "dense"))])
def test_launches_do_not_grow_with_tensors(method: Method, device: str) -> None:
    counted = []
    for tensors in (3, 12):
        values = torch.from_numpy(0.02 * np.random.default_rng(0).standard_normal(360).astype(np.float32)).bfloat16()
        old = {f"expert.{n:02}": part.clone() for n, part in enumerate(values.chunk(tensors))}
        pair = Joined(old, old, ("device", "device"), device)
        pair.update_tensors(changed(old, 1))
        with launches() as found:
            pair.commit(*pair.carry(method))
        counted.append(sorted(found))
    assert len(counted[0]) <= len(counted[1]) <= len(counted[0]) + 3  # one kernel gathers, and another writes, pieces
