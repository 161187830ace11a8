"""Bundles on a device: small tensors share tiles, and whatever is made of them is what the host makes.

The weights of a bundle lie in many tensors, of any dtype and at any address; its groups begin anywhere in it.
"""

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync import Publisher, Slice, Subscriber
from pulsesync.core.types import TensorSpec
from pulsesync.device import memory, pieces, source
from pulsesync.device.changes import find_changes
from pulsesync.device.pile import Pile, place_of
from pulsesync.device.state import DeviceBackend
from pulsesync.errors import StateError, VerificationError
from pulsesync.format import container, index, patch
from pulsesync.format import layout as layouts
from pulsesync.format.codecs import context
from pulsesync.format.layout import Layout
from pulsesync.format.manifest import Manifest, PartRef
from pulsesync.format.patch import CodecName
from pulsesync.kernels import reference
from pulsesync.publish.baseline import Keep
from pulsesync.state.host import HostBackend
from pulsesync.state.patches import PatchTransaction
from pulsesync.state.slices import find_places
from pulsesync.state.weights import WeightState
from pulsesync.store import MemoryStore
from tests.device.pairs import piles_of, to_bits, to_flats
from tests.device.test_baseline import Model, equal, kept, objects, on, read
from tests.device.test_large import count_launches
from tests.helpers import Writer, random_state
from tests.runs import version as version_of
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("parts_as_objects")
EXPERTS = 3


def model(device: str) -> Model:
    """Layers of odd sizes, of which all small tensors are in bundles: one for each dtype."""
    generator = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(device)

    out: Model = {"a": some(9, 10).bfloat16(), "counter": torch.arange(7, device=device)}
    for n in range(EXPERTS):
        out[f"layers.{n}.up"] = some(5, 7 + n).bfloat16()
        out[f"layers.{n}.scale"] = some(3)
        out[f"layers.{n}.down"] = some(31).bfloat16()[1:]  # between words
    out["layers.0.eight"] = some(6, 7).to(torch.float8_e4m3fn)
    out["layers.1.eight"] = some(13).to(torch.float8_e4m3fn)
    out["turned"] = some(5, 4).bfloat16().t()
    out["tied"] = out["a"]
    return out


WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def train_(weights: Model, step: int) -> None:
    """Change some weights of most tensors in place, by one or two places; one by far more."""
    for number, (name, tensor) in enumerate(weights.items()):
        if (number + step) % 4 and name not in ("turned", "tied"):
            tensor.view(WORDS[tensor.element_size()]).view(-1)[step % 3 :: 3] += 1 + step % 2
    weights["layers.1.up"].view(torch.int16)[0, step] ^= 0x4100
    weights["turned"].t().view(torch.int16)[step % 4] ^= 1


def published(device: str, versions: int, **options: Any) -> tuple[MemoryStore, list[Model]]:
    """A run, and the weights of each version; "host" is no device."""
    store, states, weights = MemoryStore(), [], model("cpu" if device == "host" else device)
    with nullcontext() if device == "host" else on(device), Publisher(store, **options) as pub:
        for step in range(versions):
            pub.publish(weights, step=step)
            states.append(kept(weights))
            train_(weights, step)
    return store, states


# The trainer's end


def test_a_grid_does_not_change_the_digests_of_a_run(device: str, many_lanes: None) -> None:
    grid = {"a": ([2, 5], [3]), "layers.*": ([1], []), "turned": ([], [2, 3])}
    stores = [published("host", 2, codec="gap")[0], published(device, 2, codec="gap", grid=grid)[0]]
    assert version_of(stores[0], 0).layout != version_of(stores[1], 0).layout
    digests = [[version_of(store, n).digest for n in range(2)] for store in stores]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("dtypes", [["BF16", "F8_E4M3"], slow(["BF16", "F8_E4M3", "F32", "I64"])])
def test_a_state_has_one_digest_however_it_is_cut_and_bundled(dtypes: list[str], device: str) -> None:
    rng, specs = np.random.default_rng(0), []
    for dtype in dtypes:
        specs += [TensorSpec(f"{dtype}.{n}", dtype, shape) for n, shape in enumerate([(5, 7), (4100,), (0,), (9, 8)])]
    specs.append(TensorSpec("large", "BF16", (300, 250)))
    plain = layouts.make(specs)
    cut = layouts.make(
        replace(spec, row_cuts=(2,) if spec.rows > 2 else (), column_cuts=(3, 4) if spec.columns > 4 else ())
        for spec in specs
    )
    state = random_state(rng, plain)
    owners = {piece.ordinal: piece.ordinal % 3 for piece in cut.pieces}
    expected = WeightState(HostBackend(plain, state)).digest
    for layout in (plain, layouts.bundle(plain), cut, layouts.bundle(cut), layouts.bundle(cut, owners)):
        assert WeightState(HostBackend(layout, state)).digest == expected
        assert WeightState(DeviceBackend(layout, to_flats(state, device))).digest == expected


@pytest.mark.parametrize(
    ("codec", "keep", "versions"),
    [
        ("history", "device", 3),
        ("gap", "host", 2),
        slow("auto", "device", 2),
        slow("history", "host", 3),
        slow("context", "device", 2),
        slow("dense", "device", 2),
    ],
)
def test_a_run_is_byte_for_byte_that_of_the_host(
    codec: CodecName, keep: Keep, versions: int, device: str, many_lanes: None
) -> None:
    store, states = published(device, versions, codec=codec, keep=keep)
    theirs, _ = published("host", versions, codec=codec)
    assert objects(store) == objects(theirs)
    assert equal(read(store, versions - 1, states[-1]), states[-1])


@pytest.mark.slow
@pytest.mark.parametrize("cast", ["BF16", "F16", "F8_E4M3"])
@pytest.mark.parametrize("alone", [True, False], ids=["masters alone", "beside others"])
def test_masters_in_a_bundle_are_cast_as_on_the_host(cast: str, alone: bool, device: str, many_lanes: None) -> None:
    """One of the matrices is cut between columns, so that its pieces do not lie in a row."""
    stores = MemoryStore(), MemoryStore()
    for store, here in zip(stores, (True, False), strict=True):
        torch.manual_seed(3)
        weights = {f"layers.{n}.m": torch.randn(5, 9) * 0.02 for n in range(3)}
        if not alone:
            weights |= {f"layers.{n}.o": torch.randn(11).to(dtype_of(cast)) for n in range(2)}
        weights = {name: tensor.to(device if here else "cpu") for name, tensor in weights.items()}
        grid = {"layers.1.m": (1, (4,))}
        options: dict[str, Any] = {"cast": cast, "codec": "history", "grid": grid, "min_tile": 1}
        with on(device) if here else nullcontext(), Publisher(store, **options) as pub:
            for step in range(3):
                pub.publish(weights, step=step)
                for number, tensor in enumerate(weights.values()):
                    some = tensor.view(-1)[number + step :: 4]
                    some.copy_(some.float() * 1.01)
    assert objects(stores[0]) == objects(stores[1])


def dtype_of(name: str) -> torch.dtype:
    found: torch.dtype = {"BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}[name]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_publisher_that_begins_again_takes_up_the_run_with_its_history(
    keep: Keep, device: str, many_lanes: None
) -> None:
    """The run that two publishers write is the one that a single one writes on the host."""
    store, weights = MemoryStore(), model(device)
    with on(device):
        for first in (0, 2):
            with Publisher(store, codec="history", keep=keep) as pub:
                for step in range(first, first + 2):
                    pub.publish(weights, step=step)
                    train_(weights, step)
    theirs, states = published("host", 4, codec="history")
    assert equal(read(store, 3, states[3]), states[3])
    if keep == "device":  # a base in host memory is taken for one on a device here, and rebuilt as that
        assert objects(store).keys() == objects(theirs).keys()


# The worker's end


def worker_of(device: str) -> Model:
    """Tensors of a worker, of other weights; one that is tied has memory of its own."""
    out = {name: torch.zeros_like(tensor).contiguous() for name, tensor in model(device).items()}
    out["layers.2.down"] = torch.zeros(33, dtype=torch.bfloat16, device=device)[3:]
    return out


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["history", "context", "gap", "dense"])
def test_a_worker_follows_goes_back_and_verifies(codec: CodecName, device: str, many_lanes: None) -> None:
    store, states = published("host", 4, codec=codec)
    weights = worker_of(device)
    with on(device):
        worker = Subscriber(store)
        for version in (1, 2, 3):
            worker.sync(weights, version=version)
            assert equal(weights, states[version])
        worker.verify(weights)
        worker.sync(weights, version=2)
        assert equal(weights, states[2])
        worker.verify(weights)


@pytest.mark.slow
def test_a_worker_that_has_some_experts_follows_their_groups_alone(device: str, many_lanes: None) -> None:
    store, states = published("host", 4, codec="history")
    slices: dict[str, Slice | None] = {"layers.1.*": Slice(), "*": None}
    mine = {name: tensor for name, tensor in worker_of(device).items() if ".1." in name}
    with on(device):
        worker = Subscriber(store, slices=slices)
        for version in (1, 2, 3):
            worker.sync(mine, version=version)
            assert equal(mine, {name: states[version][name] for name in mine})
        worker.verify(mine)


def test_a_slice_through_a_group_is_refused(device: str) -> None:
    store, _ = published("host", 1, codec="gap")
    with on(device), pytest.raises(StateError, match="splits a tile of the run"):
        Subscriber(store, slices={"layers.1.up": Slice(), "*": None}).sync(
            {"layers.1.up": model(device)["layers.1.up"]}
        )


# Groups that are not what the part says


LAYOUT = layouts.bundle(
    layouts.make([TensorSpec(f"layers.{n}.{name}", "BF16", (9 + n,)) for n in range(3) for name in ("x", "y")])
)


@pytest.fixture
def version(many_lanes: None) -> tuple[dict[str, np.ndarray], Manifest, bytes]:
    state = random_state(np.random.default_rng(3), LAYOUT)
    new = {name: bits.copy() for name, bits in state.items()}
    new["layers.0.x"][2:5] += 1
    new["layers.2.y"][3] ^= 1
    record, (data,) = Writer(LAYOUT, state, "context").advance(new)
    return state, record, bytes(data)


def with_other_check(data: bytes, record: Manifest, layout: Layout) -> tuple[Manifest, bytes]:
    """The same with another check of the last group that changes."""
    header, sections = container.open_part(data)
    opened = patch.open_index(header, sections[0], layout)
    ((entry, body),) = patch.payloads(opened, dict(enumerate(sections)))
    heads, begin = context.parse_heads(body, layout.tiles[0])
    assert heads.checks.size == 2
    heads = heads._replace(checks=heads.checks ^ np.array([0, 1], np.uint32))
    payload = context.build_heads(heads) + bytes(body[begin:])
    lists = [[index.build(opened.tables, [entry._replace(size=len(payload))])], [payload]]
    name, forged = container.build(layout.id, lists)
    return replace(record, parts=(PartRef(name, len(forged)),)), bytes(forged)


def test_a_group_that_does_not_become_what_its_check_says_is_refused(
    version: tuple[dict[str, np.ndarray], Manifest, bytes], device: str
) -> None:
    state, record, data = version
    forged, bad = with_other_check(data, record, LAYOUT)
    here = WeightState(DeviceBackend(LAYOUT, to_flats(state, device)))
    for live in (here, WeightState(HostBackend(LAYOUT, {name: bits.copy() for name, bits in state.items()}))):
        with pytest.raises(VerificationError, match="group of bundle 0"):
            PatchTransaction(live).prepare(forged, [bad])
    here.commit(PatchTransaction(here).prepare(record, [data]))
    assert here.digest == record.digest


# What the host does for each tensor


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done for each tensor: views made, tables of pieces, and addresses looked up."""
    done: list[str] = []

    def note(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def noted(*args: Any, **options: Any) -> Any:
            done.append(what)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, noted)

    note(memory.DeviceView, "__init__", "view")
    note(pieces.Pieces, "__init__", "pieces")
    note(pieces.Pieces, "addresses", "addresses")
    note(pieces.PieceTable, "__init__", "table")
    note(Pile, "__init__", "pile")
    note(source._LaterDeviceViews, "__getitem__", "view")
    return done


def plain(device: str) -> Model:
    """Tensors that are each in one run of memory."""
    return {name: tensor for name, tensor in model(device).items() if name != "turned"}


def train_plain_(weights: Model, step: int) -> None:
    train_({**weights, "turned": torch.zeros(5, 4, dtype=torch.bfloat16).t()}, step)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["device", "host"])
def test_a_source_that_stays_costs_a_publisher_no_views_and_no_tables(
    keep: Keep, device: str, work: list[str], many_lanes: None
) -> None:
    weights, counts = plain(device), []
    with on(device), Publisher(MemoryStore(), codec="history", keep=keep) as pub:
        for step in range(5):
            work.clear()
            pub.publish(weights, step=step)
            counts.append(list(work))
            train_plain_(weights, step)
    assert {"view", "pieces", "addresses", "table", "pile"} <= {*counts[0], *counts[1]}
    assert counts[2:] == [[], [], []]


def test_a_source_that_stays_costs_a_worker_no_views_and_no_tables(
    device: str, work: list[str], many_lanes: None
) -> None:
    store, states = published("host", 4, codec="history")
    weights, counts = worker_of(device), []
    with on(device):
        worker = Subscriber(store)
        for version in range(4):
            work.clear()
            worker.sync(weights, version=version)
            counts.append(list(work))
    assert equal(weights, states[3])
    assert counts[3:] == [[]]


@pytest.mark.slow
def test_a_source_that_moves_is_found_where_it_is(device: str, many_lanes: None) -> None:
    stores = MemoryStore(), MemoryStore()
    for store, here in zip(stores, (True, False), strict=True):
        weights = plain(device if here else "cpu")
        with on(device) if here else nullcontext(), Publisher(store, codec="history") as pub:
            for step in range(4):
                pub.publish(weights, step=step)
                train_plain_(weights, step)
                weights["layers.1.down"] = weights["layers.1.down"].clone()
                weights[f"layers.{step % 3}.scale"] = weights[f"layers.{step % 3}.scale"].clone()
    assert objects(stores[0]) == objects(stores[1])


@pytest.mark.slow
def test_a_worker_whose_tensors_moved_is_synced_where_they_are(device: str) -> None:
    store, states = published("host", 3, codec="gap")
    weights = worker_of(device)
    with on(device):
        worker = Subscriber(store)
        worker.sync(weights, version=1)
        left = weights["layers.1.up"]
        weights["layers.1.up"] = left.clone()
        worker.sync(weights, version=2)
        assert equal(weights, states[2])
        assert equal({"x": left}, {"x": states[1]["layers.1.up"]})


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["device", "host"])
def test_nothing_keeps_the_weights_of_a_source_alive(keep: Keep, device: str) -> None:
    weights = plain(device)
    with on(device), Publisher(MemoryStore(), codec="gap", keep=keep) as pub:
        for step in range(3):
            pub.publish(weights, step=step)
            train_plain_(weights, step)
        gone = [weakref.ref(tensor.untyped_storage()) for tensor in weights.values()]
        weights.clear()
        assert [one() for one in gone] == [None] * len(gone)


def launches_for(layers: int, device: str, launches: list[str]) -> list[str]:
    """The kernels that are launched to publish and sync a version of this many layers of small tensors."""
    torch.manual_seed(1)
    names = [f"layers.{n}.{name}" for n in range(layers) for name in ("a", "b")]
    weights = {name: (torch.randn(40) * 0.02).bfloat16().to(device) for name in names}
    held = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    store = MemoryStore()
    with Publisher(store, codec="history") as pub:
        worker = Subscriber(store)
        for step in range(2):
            launches.clear()
            pub.publish(weights, step=step)
            worker.sync(held)
            for tensor in weights.values():
                tensor.view(torch.int16)[20:23] += 1
    return list(launches)


@pytest.mark.slow
def test_more_tensors_take_no_more_launches(device: str, many_lanes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = count_launches(monkeypatch)
    with on(device):
        few = launches_for(2, device, launches)
        assert {"gather_pieces", "apply_pieces", "compare", "encode", "decode"} <= set(few)
        assert sorted(launches_for(5, device, launches)) == sorted(few)


# Where weights are


def bundled_pile(dtype: str, device: str, sizes: Mapping[str, int]) -> tuple[Layout, Pile]:
    layout = layouts.bundle(layouts.make(TensorSpec(name, dtype, (size,)) for name, size in sizes.items()))
    places = {ordinal: place_of(found) for ordinal, found in find_places(layout, {}).items()}
    return layout, piles_of(layout, device, places)[0]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", slow("F32"), "I64"])
def test_groups_are_compared_wherever_they_begin(dtype: str, device: str) -> None:
    """Of sizes that leave every remainder of a word, one of them more than a chunk."""
    sizes = {f"layers.{n}.x": size for n, size in enumerate((1, 6, 4099, 3, 2, 40, 7, 33, 5))}
    layout, pile = bundled_pile(dtype, device, sizes)
    old = random_state(np.random.default_rng(1), layout)
    new = {name: bits.copy() for name, bits in old.items()}
    for bits in new.values():
        bits[[0, -1]] ^= bits.dtype.type(1)
        bits[bits.size // 2] ^= bits.dtype.type(6)
    before, after = (pile.locate(to_flats(state, device)) for state in (old, new))
    found = find_changes(pile, before, after, cast=False)
    starts = found.starts.tolist()
    assert pile.blocks == len(sizes)
    for b, name in enumerate(sizes):
        here = slice(starts[b], starts[b + 1])
        expected = reference.changed(old[name], new[name])
        for ours, theirs in zip((found.positions, found.old, found.new), expected, strict=True):
            assert np.array_equal(memory.to_host(ours[here])[0].view(theirs.dtype), theirs)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BF16", slow("F32"), "I64"])
def test_changes_of_bundles_are_written_where_their_tensors_are(dtype: str, device: str) -> None:
    sizes = {f"layers.{n // 3}.{n}": size for n, size in enumerate((1, 6, 40, 3, 2, 7, 33, 5))}
    layout, _ = bundled_pile(dtype, device, sizes)
    old, new = (random_state(np.random.default_rng(seed), layout) for seed in (1, 2))
    backend = DeviceBackend(layout, to_flats(old, device))
    pile = backend.piles[0]
    before, after = (pile.locate(to_flats(some, device)) for some in (old, new))
    found = find_changes(pile, before, after, cast=False)
    backend.write([found])
    assert {name: bits.tolist() for name, bits in to_bits(backend.flats).items()} == {
        name: bits.tolist() for name, bits in new.items()
    }
    there = WeightState(HostBackend(layout, new))
    assert backend.count() == there.sums
