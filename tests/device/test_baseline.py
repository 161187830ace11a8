"""A publisher and a subscriber whose weights are on a device: the runs are those of the host, and can be read there.

So are those of a team of ranks whose shards are on a device.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

import pulsesync
from pulsesync import device as devices
from pulsesync.core.types import TensorSpec
from pulsesync.device.baseline import DeviceBaseline
from pulsesync.device.memory import Tensors
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.format.patch import CodecName
from pulsesync.publish.baseline import Keep
from pulsesync.run import keys
from pulsesync.state.sharding import Placed
from pulsesync.store import MemoryStore
from tests.backends import host_as_device
from tests.device.pairs import SPECS, Pair, small, trained
from tests.publish.test_sharded import Group, by_columns, by_rows
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import Watched
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("parts_as_objects")

Model = dict[str, torch.Tensor]


def on(device: str) -> AbstractContextManager[None]:
    """A context in which tensors count as tensors on a GPU; without one, Triton's interpreter runs the kernels."""
    return nullcontext() if device == "cuda" else host_as_device()


def model(device: str) -> Model:
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.02

    out = {"a": some(9, 10).bfloat16(), "b": some(30), "i": torch.arange(7)}
    out = {name: tensor.to(device) for name, tensor in out.items()}
    out["odd"] = some(20).bfloat16().to(device)[1:]
    out["turned"] = some(5, 4).bfloat16().to(device).t()
    out["tied"] = out["a"]
    return out


def train_(weights: Model, step: int) -> None:
    """Change some weights in place."""
    weights["a"].view(torch.int16)[step % 9, 1:5] += 1
    weights["b"].view(torch.int32)[step % 30] -= 70_000
    weights["i"][step % 7] += 1
    weights["odd"].view(torch.int16)[step % 19] += 3
    weights["turned"].t().view(torch.int16)[step % 4] ^= 1


def kept(weights: Mapping[str, torch.Tensor]) -> Model:
    """A copy on the host."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(*(state[name].cpu().contiguous().view(-1).view(torch.uint8) for state in (a, b)))
        for name in a
    )


def read(store: Any, version: int, like: Mapping[str, torch.Tensor], **options: Any) -> Model:
    """A version as a worker on the host reads it."""
    out = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in like.items() if name != "tied"}
    if "tied" in like:
        out["tied"] = out["a"]
    Subscriber(store, **options).sync(out, version=version)
    return out


def objects(store: MemoryStore) -> dict[str, bytes]:
    return {entry.key: store.get(entry.key) for entry in store.list("parts/")}


def published(device: str, versions: int, **options: Any) -> tuple[MemoryStore, list[Model]]:
    """A run, and the weights of each version."""
    store, states, weights = MemoryStore(), [], model("cpu" if device == "host" else device)
    with nullcontext() if device == "host" else on(device), Publisher(store, **options) as pub:
        for step in range(versions):
            pub.publish(weights, step=step)
            states.append(kept(weights))
            train_(weights, step)
    return store, states


@pytest.mark.parametrize(
    ("codec", "keep", "versions"), [slow("gap", "device", 3), slow("gap", "host", 3), ("history", None, 2)]
)
def test_a_run_is_byte_for_byte_that_of_the_host_and_is_read_there(
    codec: CodecName, keep: Keep | None, versions: int, device: str, many_lanes: None
) -> None:
    store, states = published(device, versions, codec=codec, keep=keep)
    theirs, _ = published("host", versions, codec=codec)
    assert objects(store) == objects(theirs)
    for version, state in enumerate(states):
        assert equal(read(store, version, state), state)


def test_a_worker_here_follows_goes_back_and_verifies(device: str) -> None:
    store, states = published("host", 4, codec="gap")
    weights = {name: torch.zeros_like(tensor) for name, tensor in model(device).items() if name != "turned"}
    weights["turned"] = torch.zeros(4, 5, dtype=torch.bfloat16, device=device)
    weights["tied"] = weights["a"]
    with on(device):
        worker = Subscriber(store)
        worker.sync(weights, version=1)
        assert equal(weights, states[1])
        report = worker.sync(weights)
        assert equal(weights, states[3])
        assert report.path == ("patch", "patch")
        worker.verify(weights)
        assert worker.sync(weights, version=1).version == 1  # two versions that came together go together
        assert equal(weights, states[1])
        worker.verify(weights)


def test_a_worker_here_finds_and_repairs_what_something_else_wrote(device: str) -> None:
    store, states = published("host", 2, codec="gap")
    weights = {name: torch.zeros_like(tensor) for name, tensor in model(device).items() if name != "turned"}
    weights["turned"] = torch.zeros(4, 5, dtype=torch.bfloat16, device=device)
    weights["tied"] = weights["a"]
    with on(device):
        worker = Subscriber(store)
        worker.sync(weights)
        assert worker.sync(weights, verify=True).repaired == ()
        weights["a"].zero_()
        report = worker.sync(weights, verify=True)
        assert (report.repaired, report.path[0]) == (("a", "odd", "turned"), "anchor")  # which are one bundle
        assert equal(weights, states[1])


@pytest.mark.parametrize("keep", ["device", slow("host")])
def test_torchs_default_device_is_of_no_concern(keep: Keep, device: str, many_lanes: None) -> None:
    store, weights = MemoryStore(), model(device)
    held = {name: torch.zeros_like(tensor).contiguous() for name, tensor in weights.items()}
    held["tied"] = held["a"]
    with on(device), Publisher(store, codec="history", keep=keep) as pub:
        worker = Subscriber(store)
        for step in range(2):
            with torch.device("meta"):  # where nothing can be read
                pub.publish(weights, step=step)
                worker.sync(held)
            assert equal(held, weights)
            train_(weights, step)


def test_masters_are_cast_on_the_way(device: str) -> None:
    store = MemoryStore()
    torch.manual_seed(3)
    masters = {"a": torch.randn(40, device=device), "b": torch.randn(3, 5, device=device).t()}
    with on(device), Publisher(store, cast="BF16", codec="gap") as pub:
        for step in range(2):
            pub.publish(masters, step=step)
            state = {name: tensor.bfloat16() for name, tensor in masters.items()}
            assert equal(read_with_host(store, step, state, device), kept(state))
            masters["a"][3:9] *= 1.01
            masters["b"][0] += 1


def test_masters_are_cast_as_they_are_read_beside_tensors_that_are_not(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is made of those with tiles of their own, and the run is that of the host."""
    stores, copies, published_as = (MemoryStore(), MemoryStore()), [], Tensors.published

    def noted(tensors: Tensors, name: str) -> torch.Tensor:
        copies.append(name)
        return published_as(tensors, name)

    for store, here in zip(stores, (True, False), strict=True):
        torch.manual_seed(3)
        weights = {"a": torch.randn(9), "m": torch.randn(1 << 16), "z": torch.randn(7)}
        weights |= {"n": torch.randn(30).bfloat16(), "o": torch.randn(1 << 16).bfloat16()}
        weights = {name: tensor.to(device if here else "cpu") for name, tensor in weights.items()}
        with on(device) if here else nullcontext(), Publisher(store, cast="BF16", codec="gap") as pub:
            pub.publish(weights)
            weights["m"][1:9] *= 1.01
            weights["n"].view(torch.int16)[5:9] += 1
            weights["o"].view(torch.int16)[5:9] += 1
            weights["z"][6] *= 1 + 2**-20  # not seen
            weights["z"][5] *= 1.01
            with monkeypatch.context() as patched:
                patched.setattr(Tensors, "published", noted)
                assert pub.publish(weights, step=1).changed == 17
    assert copies == []
    assert objects(stores[0]) == objects(stores[1])


def read_with_host(store: Any, version: int, like: Model, device: str) -> Model:
    """The same while tensors are taken for ones on a GPU: then this is one there too."""
    out = {name: torch.zeros(t.shape, dtype=t.dtype, device=device) for name, t in like.items()}
    Subscriber(store).sync(out, version=version)
    return out


# While training goes on


@pytest.mark.parametrize("keep", ["device", "host"])
def test_what_is_published_is_what_was_there_at_the_call(keep: Keep, device: str) -> None:
    """The store holds the first version up; meanwhile weights change, and are published twice more, and change."""
    store, arrived, go, weights, states = Watched(), Event(), Event(), model(device), []

    def hold(verb: str, key: str) -> None:
        if (verb, key[:6]) == ("put", "parts/"):
            arrived.set()
            go.wait(30)

    with on(device), Publisher(store, codec="gap", keep=keep) as pub:
        pub.publish(weights, step=0)
        store.before = hold
        futures = []
        for step in range(1, 4):
            train_(weights, step)
            if step == 3:
                weights["a"].view(torch.int16)[1, 1:5] -= 1  # takes back what the first version has
            futures.append(pub.publish(weights, step=step, wait=False))
            states.append(kept(weights))
            overwrite_(weights)
            assert arrived.wait(30)  # the first is encoded, and may be sent
            restore_(weights, states[-1])
        overwrite_(weights)
        assert not any(future.done() for future in futures)
        go.set()
        reports = [future.result(30) for future in futures]
    assert [report.version for report in reports] == [1, 2, 2]
    assert reports[2].coalesced == 1
    assert equal(read(store, 1, states[0]), states[0])
    assert equal(read(store, 2, states[2]), states[2])


@pytest.mark.parametrize("keep", ["device", slow("host")])
def test_without_coalescing_every_step_is_a_version(keep: Keep, device: str) -> None:
    """The store takes 40 ms for each of three bodies, so that steps come faster than versions are sent."""
    store, weights, states = Watched(), model(device), []
    with on(device), Publisher(store, codec="gap", keep=keep) as pub:
        pub.publish(weights, step=0)
        store.before = lambda verb, key: time.sleep(0.04) if key.startswith("parts/") else None
        futures = []
        for step in range(1, 4):
            train_(weights, step)
            states.append(kept(weights))
            futures.append(pub.publish(weights, step=step, wait=False, coalesce=False))
        assert [future.result(30).version for future in futures] == [1, 2, 3]
    for number, state in enumerate(states, 1):
        assert equal(read(store, number, state), state)


def overwrite_(weights: Model) -> None:
    for tensor in weights.values():
        tensor.zero_()


def restore_(weights: Model, state: Model) -> None:
    for name, tensor in weights.items():
        tensor.copy_(state[name])


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
@pytest.mark.parametrize("keep", ["device", "host"])
def test_training_on_during_a_publish_cannot_change_what_is_published(keep: Keep, side: bool) -> None:
    """Work is queued before and after every call, and the store is slow: comparing, encoding and training overlap."""
    store, futures, states = Watched(), [], []
    store.before = lambda verb, key: time.sleep(0.02)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream), Publisher(store, keep=keep) as pub:
        weights = {"a": (torch.randn(1 << 23, device="cuda") * 0.02).bfloat16()}
        bits = weights["a"].view(torch.int16)
        pub.publish(weights)
        for step in range(8):
            torch.cuda._sleep(20_000_000)
            bits[step::97] += 1
            futures.append(pub.publish(weights, step=step, wait=False))
            states.append(bits.clone())
            for _ in range(20):
                bits.mul_(3)
            bits.copy_(states[-1])
        bits.zero_()
        versions = {future.result(60).version: state for future, state in zip(futures, states, strict=True)}
        stream.synchronize()
    assert max(number or 0 for number in versions) > 1
    there, worker = {"a": torch.zeros_like(weights["a"])}, Subscriber(store)
    for version, state in sorted(versions.items()):  # of steps that were coalesced into one version, the last
        worker.sync(there, version=version)
        assert torch.equal(there["a"].view(torch.int16), state)


def find_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the tensors of a base that is kept in host memory as host tensors, as on a GPU; `on` alone does not."""
    own, find, in_host = DeviceBaseline._own, devices.find, []

    def noted(baseline: DeviceBaseline, flat: torch.Tensor) -> torch.Tensor:
        out = own(baseline, flat)
        if baseline.keep == "host":
            in_host.append(out)  # and kept, so that no other tensor reuses its address
        return out

    def by_place(source: Any) -> torch.device | None:
        places = {tensor.data_ptr() for tensor in in_host if tensor.numel()}
        return None if any(tensor.data_ptr() in places for tensor in source.values()) else find(source)

    monkeypatch.setattr(DeviceBaseline, "_own", noted)
    monkeypatch.setattr(devices, "find", by_place)


@pytest.mark.parametrize("keep", [None, slow("host")])
def test_a_publisher_that_begins_again_takes_up_the_run(
    keep: Keep | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, weights = MemoryStore(), model(device)
    if keep == "host":
        find_by_place(monkeypatch)
    with on(device):
        with Publisher(store, codec="gap", keep=keep) as pub:
            for step in range(2):
                pub.publish(weights, step=step)
                train_(weights, step)
        with Publisher(store, codec="gap", keep=keep) as pub:
            assert pub.publish(weights, step=2).version == 2
            state = kept(weights)
    assert equal(read(store, 2, state), state)
    assert len(objects(store)) == 3  # an anchor and two patches


@pytest.mark.parametrize("keep", [None, slow("host")])
def test_a_fresh_model_is_refused_here_too(keep: Keep | None, device: str) -> None:
    store, states = published(device, 1)
    before = objects(store)
    other = {name: -tensor for name, tensor in states[0].items() if name != "tied"}
    other["tied"] = other["a"]
    with on(device), Publisher(store, keep=keep) as pub:
        with pytest.raises(StateError, match="do not continue the run"):
            pub.publish(other, step=0, wait=False)
        assert objects(store) == before
        assert pub.publish({**states[0], "tied": states[0]["a"]}, step=0).changed == 0


def test_the_host_takes_up_a_run_from_here(device: str) -> None:
    store, states = published(device, 2, codec="gap")
    weights = {name: tensor.clone() for name, tensor in states[1].items()}
    weights["tied"] = weights["a"]
    train_({**weights, "turned": weights["turned"].t().contiguous().t()}, 5)
    with Publisher(store, codec="gap") as pub:
        assert pub.publish(weights, step=2).version == 2
    assert equal(read(store, 2, weights), weights)


# Special cases in which the bytes must be those of the host


def test_without_a_history_what_an_epoch_remembers_goes_on(device: str, many_lanes: None) -> None:
    """The cut stays the same, so the hot weights that encoding has found are the ones that the history records."""
    layout = layouts.make([TensorSpec("a", "BF16", (150,))])
    weights = (torch.randn(150, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()
    bits = weights.view(torch.int16).numpy().view(np.uint16)
    pair = Pair(layout, {"a": bits}, device, "history")
    steps: tuple[tuple[int, CodecName], ...] = ((1, "history"), (3, "context"))
    for first, codec in steps:
        pair.codec = pair.writer.codec = codec
        bits[first::9] += 1
        record, _ = pair.advance({"a": bits})
        assert record.history is not None


def test_what_was_compared_with_the_version_before_has_its_tables_in_order(device: str, many_lanes: None) -> None:
    """The version that came between has changes of F32 alone; what remains has them of BF16 and F32."""
    layout, state = small(2, SPECS[:2])
    pair, later = Pair(layout, state, device, "context"), trained(layout, state, 1)
    first, second = pair.difference({**state, "b": trained(layout, state, 2)["b"]}), pair.difference(later)
    _, done = first.encode(pair.last, "context")
    rebased = second.after(done)
    pair.state.commit(done)
    pair.last, _ = pair.writer.advance({**state, "b": trained(layout, state, 2)["b"]})
    part, _ = rebased.encode(pair.last, "context")
    _, (data,) = pair.writer.advance(later)
    assert bytes(part.data) == bytes(data)


# What is refused


@pytest.mark.parametrize("others", [{}, {"a": torch.zeros(3)}], ids=["all", "some"])
def test_tensors_on_other_hardware_are_refused(others: dict[str, torch.Tensor], device: str) -> None:
    with on(device), pytest.raises(StateError, match="'b' is on meta; host memory and CUDA devices are supported"):
        Publisher(MemoryStore()).publish({**others, "b": torch.zeros(3, device="meta")})


def test_a_base_on_a_device_is_for_tensors_there() -> None:
    with pytest.raises(ValueError, match="applies to tensors on a GPU"):
        Publisher(MemoryStore(), keep="device").publish({"a": torch.zeros(3)})


def test_a_way_to_keep_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep must be one of 'device', 'host'; got 'disk'$"):
        Publisher(MemoryStore(), keep="disk")


def test_what_took_the_old_weights_from_the_caller_was_removed() -> None:
    with pytest.raises(ValueError, match=r"got 'hook'; keep='hook' was removed in 0\.2: use keep='device'"):
        Publisher(MemoryStore(), keep="hook")
    publish: Any = Publisher(MemoryStore()).publish
    with pytest.raises(TypeError, match=r"no longer takes old=: .* leave old= out"):
        publish({}, old={})
    with pytest.raises(TypeError, match="unexpected keyword argument 'wiat'"):
        publish({}, wiat=True)
    make: Any = pulsesync.Publisher
    with pytest.raises(TypeError, match="no longer takes executor="):
        make(MemoryStore(), executor=None)


def test_tensors_that_came_or_went_are_refused(device: str) -> None:
    weights = model(device)
    with on(device), Publisher(MemoryStore()) as pub:
        pub.publish(weights)
        with pytest.raises(StateError, match="publish the changed model to a new location"):
            pub.publish({**weights, "new": weights["b"].clone()})
        assert keys.manifest_key(1) not in {entry.key for entry in pub.store.list("manifests/")}


# The tiles of one rank of several


def sharded(device: str) -> Model:
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (4, 16), "b": (5,)}
    return {name: (torch.randn(shape, generator=generator) * 0.02).to(device) for name, shape in shapes.items()}


def train_shards_(weights: Model, step: int) -> None:
    weights["a"][step % 4] *= 1.01
    weights["b"][step % 5] += 1e-3


def by_both(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Each rank has some columns of a matrix; every rank has all other tensors, which the first rank owns."""
    out = dict(weights)
    a = weights["a"]
    out["a"] = Placed(a[:, 8 * rank : 8 * rank + 8].contiguous(), tuple(a.shape), columns=(8 * rank, 8 * rank + 8))
    return out


def by_leftovers(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The first rank has some columns, the second has all and owns the rest, which do not begin at its first column."""
    a = weights["a"]
    return {**weights, "a": Placed(a[:, :5], tuple(a.shape), columns=(0, 5))} if rank == 0 else dict(weights)


def all_of_it(weights: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Every rank has all tensors; the first rank owns them."""
    return dict(weights)


@pytest.mark.parametrize(
    ("split", "codec", "versions", "keep"),
    [
        (by_rows, "history", 3, None),
        slow(by_rows, "history", 3, "host"),
        slow(by_columns, "context", 2, "device"),
        (by_both, "gap", 2, "host"),
        slow(by_leftovers, "context", 2, None),
        (by_leftovers, "context", 2, "host"),
    ],
)
def test_a_version_of_all_ranks_is_that_from_host_memory(
    split: Callable[..., dict[str, Any]],
    codec: CodecName,
    versions: int,
    keep: Keep | None,
    device: str,
    many_lanes: None,
) -> None:
    stores, states = [MemoryStore(), MemoryStore()], []
    for store, where in zip(stores, ("cpu", device), strict=True):
        weights = sharded(where)
        with nullcontext() if store is stores[0] else on(device):
            options: dict[str, Any] = {} if store is stores[0] else {"keep": keep}
            group = Group(store, 2, split, timeout_s=60, codec=codec, cast="BF16", min_tile=1, **options)
            for step in range(versions):
                group.publish(weights, step=step)
                states.append({name: tensor.bfloat16() for name, tensor in kept(weights).items()})
                train_shards_(weights, step)
            group.flush()  # the anchor, too, which a thread writes
    assert objects(stores[0]) == objects(stores[1])
    held = {name: torch.zeros_like(tensor) for name, tensor in states[-1].items()}
    Subscriber(stores[1]).sync(held)
    assert equal(held, states[-1])


@pytest.mark.parametrize(
    ("split", "keep"),
    [(by_rows, None), *(slow(*case) for case in ((all_of_it, None), (by_rows, "host"), (all_of_it, "host")))],
)
def test_ranks_resume_a_run_continue_it_without_a_change_and_write_anchors(
    split: Callable[..., dict[str, Any]],
    keep: Keep | None,
    device: str,
    many_lanes: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, weights = MemoryStore(), sharded(device)
    options: dict[str, Any] = {"codec": "history", "cast": "BF16", "anchor_every": 0.0, "keep": keep}
    if keep == "host":
        find_by_place(monkeypatch)
    with on(device):
        group = Group(store, 2, split, timeout_s=60, **options, epoch_patches=2)
        for step in range(2):
            group.publish(weights, step=step)
            train_shards_(weights, step)
        group = Group(store, 2, split, timeout_s=60, **options, epoch_patches=2)
        assert group.publish(weights, step=2).changed
        assert [pub.version for pub in group.pubs] == [2, 2]
        assert group.publish(weights, step=3).changed == 0
        group.flush()
    assert len(list(store.list("anchors/"))) == 2
    state = {name: tensor.bfloat16() for name, tensor in kept(weights).items()}
    held = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    worker = Subscriber(store, epoch_patches=2)
    worker.sync(held)
    worker.verify(held)
    assert equal(held, state)


def test_shards_that_moved_elsewhere_are_refused(device: str) -> None:
    weights = sharded(device)
    with on(device):
        group = Group(MemoryStore(), 2, by_rows, timeout_s=60, codec="gap")
        group.publish(weights)
    there = {name: np.asarray(tensor.cpu()) for name, tensor in weights.items()}
    for one in group.try_publish(there):
        assert isinstance(one, StateError)
        assert one.tensor == "a"
