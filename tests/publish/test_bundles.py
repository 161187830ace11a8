"""Small tensors share tiles, and a reader still takes only the layers and experts that it has."""

import gc
import json
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync.core.types import TensorSpec
from pulsesync.errors import FormatError, StateError
from pulsesync.format import layout as layouts
from pulsesync.format.patch import CodecName
from pulsesync.run.reader import RunReader
from pulsesync.state.sharding import Placed
from pulsesync.state.slices import Slice
from pulsesync.state.views import SourceMarks
from pulsesync.store import MemoryStore
from tests.publishers import Publisher
from tests.readers import Subscriber
from tests.runs import equal

BF16 = np.dtype(ml_dtypes.bfloat16)
CODECS: list[CodecName] = ["auto", "history", "context", "gap", "dense"]


def model(seed: int = 0, layers: int = 3, experts: int = 4) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"embed": (40, 12), "norm": (12,)}
    for layer in range(layers):
        shapes |= {f"layers.{layer}.{name}": (12,) for name in ("norm_1", "norm_2")}
        for expert in range(experts):
            shapes |= {f"layers.{layer}.experts.{expert}.{name}": (12, 30) for name in ("down", "up")}
    weights: dict[str, Any] = {name: (0.02 * rng.standard_normal(shape)).astype(BF16) for name, shape in shapes.items()}
    return weights | {f"layers.{layer}.scale": rng.standard_normal(()).astype(np.float32) for layer in range(layers)}


def step(weights: dict[str, Any], seed: int, share: float = 0.05) -> None:
    rng = np.random.default_rng(seed)
    for array in weights.values():
        bits = array.reshape(-1).view(f"u{array.itemsize}")
        bits[rng.random(bits.size) < share] ^= 1


def copied(weights: dict[str, Any]) -> dict[str, Any]:
    return {name: array.copy() for name, array in weights.items()}


def layout_in(store: MemoryStore) -> layouts.Layout:
    reader = RunReader(store, None)
    newest = reader.newest()
    assert newest is not None
    return reader.layout(newest.layout)


def test_a_group_has_the_tensors_of_one_layer_or_expert() -> None:
    store = MemoryStore()
    with Publisher(store) as pub:
        pub.publish(model())
    layout = layout_in(store)
    assert layout.tile_count == 2  # all of BF16, all of F32
    for tile in layout.tiles:
        for begin, end in zip(tile.groups, tile.groups[1:], strict=False):
            starts = np.cumsum([0, *(piece.size for piece in tile.pieces)])
            inside = [p.tensor.name for p, at in zip(tile.pieces, starts, strict=False) if begin <= at < end]
            assert len({layouts.part_of_model(name) for name in inside}) == 1


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.mlp.experts.17.down_proj.weight", "model.layers.0.mlp.experts.17"),
        ("model.layers.3.input_layernorm.weight", "model.layers.3"),
        ("params/layers_3/attention/kernel", "params/layers_3"),
        ("encoder.Block12.norm", "encoder.Block12"),
        ("lm_head.weight", ""),
        ("w1", ""),
        ("h.0.ln_1.bias", "h.0"),
    ],
)
def test_a_tensor_belongs_to_the_layer_or_expert_in_its_name(name: str, part: str) -> None:
    assert layouts.part_of_model(name) == part


@pytest.mark.parametrize("codec", CODECS)
def test_a_worker_with_everything_and_one_with_two_experts_follow_a_run(codec: CodecName) -> None:
    store, weights = MemoryStore(), model()
    some = {"layers.*.experts.[13].*": Slice(), "layers.*.experts.*": None}
    mine = {n: a for n, a in copied(weights).items() if ".experts." not in n or n.split(".")[3] in "13"}
    whole = copied(weights)
    everything, expert = Subscriber(store), Subscriber(store, slices=some)
    with Publisher(store, codec=codec) as pub:
        for seed in range(6):
            pub.publish(weights)
            everything.sync(whole)
            expert.sync(mine)
            assert equal(whole, weights)
            assert equal(mine, {name: weights[name] for name in mine})
            step(weights, seed, share=(0.05, 0.5)[seed == 3])
    assert everything.verify() == pub.digest


def test_a_worker_with_some_layers_follows_a_run_over_epochs() -> None:
    short_epochs = 2
    store, weights = MemoryStore(), model()
    mine = {name: array for name, array in copied(weights).items() if name.startswith("layers.1.")}
    sub = Subscriber(store, slices={"layers.1.*": Slice(), "*": None}, epoch_patches=short_epochs)
    with Publisher(store, codec="history", epoch_patches=short_epochs) as pub:
        for seed in range(3 * short_epochs + 1):
            pub.publish(weights)
            sub.sync(mine)
            assert equal(mine, {name: weights[name] for name in mine})
            step(weights, seed)


def test_weights_of_an_expert_that_something_else_wrote_are_found_by_the_check_of_its_group() -> None:
    store, weights = MemoryStore(), model()
    mine = {name: array for name, array in copied(weights).items() if ".experts.2." in name}
    sub = Subscriber(store, slices={"layers.*.experts.2.*": Slice(), "*": None})
    with Publisher(store, codec="context") as pub:
        pub.publish(weights)
        sub.sync(mine)
        mine["layers.1.experts.2.up"].view(np.uint16)[...] ^= 0x80  # an exponent: other contexts
        step(weights, 1)
        pub.publish(weights)
        assert "layers.1.experts.2.up" in sub.sync(mine, version=1).repaired
    assert equal(mine, {name: weights[name] for name in mine})


@pytest.mark.parametrize("codec", ["gap", "dense"])
def test_a_slice_through_a_bundled_tensor_is_read_with_a_codec_that_needs_no_old_weights(codec: CodecName) -> None:
    store, weights = MemoryStore(), model()
    mine = copied(weights) | {"embed": weights["embed"][10:25].copy()}
    sub = Subscriber(store, slices={"embed": Slice(rows=(10, 25))})
    with Publisher(store, codec=codec) as pub:
        for seed in range(3):
            pub.publish(weights)
            sub.sync(mine)
            assert equal(mine, weights | {"embed": weights["embed"][10:25]})
            step(weights, seed)


def test_a_slice_through_a_bundled_tensor_is_refused_with_advice_otherwise() -> None:
    store, weights = MemoryStore(), model()
    mine = copied(weights) | {"embed": weights["embed"][10:25].copy()}
    sub = Subscriber(store, slices={"embed": Slice(rows=(10, 25))})
    with Publisher(store, codec="context") as pub:
        pub.publish(weights)
        sub.sync(mine)
        step(weights, 0)
        pub.publish(weights)
        with pytest.raises(StateError, match=r"has borders there, or with codec='step' or 'gap'"):
            sub.sync(mine)


def test_a_slice_along_the_grid_is_read_whatever_the_codec() -> None:
    store, weights = MemoryStore(), model()
    mine = {name: array[:6].copy() if ".experts." in name else array.copy() for name, array in weights.items()}
    sub = Subscriber(store, slices={"layers.*.experts.*": Slice(rows=(0, 6))})
    with Publisher(store, codec="history", grid={"layers.*.experts.*": (2, 1)}, min_tile=1) as pub:
        for seed in range(3):
            pub.publish(weights)
            sub.sync(mine)
            assert equal(mine, {n: array[:6] if ".experts." in n else array for n, array in weights.items()})
            step(weights, seed)


def test_a_resumed_publisher_goes_on_with_its_bundles() -> None:
    store, weights, worker = MemoryStore(), model(), model(1)
    sub = Subscriber(store)
    for seed in range(3):
        with Publisher(store) as pub:
            for again in range(2):
                pub.publish(weights)
                sub.sync(worker)
                assert equal(worker, weights)
                step(weights, 10 * seed + again)
    assert layout_in(store).tile_count == 2


def test_masters_are_cast_and_tied_tensors_written_where_they_are_bundled() -> None:
    store = MemoryStore()
    rng = np.random.default_rng(0)
    masters = {f"layers.{n}.w": rng.standard_normal((9, 7)).astype(np.float32) for n in range(5)}
    masters |= {"head": masters["layers.0.w"], "layers.0.bf16": rng.standard_normal(5).astype(BF16)}
    worker: dict[str, Any] = {name: np.zeros(array.shape, BF16) for name, array in masters.items()}
    sub = Subscriber(store)
    with Publisher(store, cast={"*": "BF16"}) as pub:
        for _ in range(3):
            pub.publish(masters)
            sub.sync(worker)
            assert equal(worker, {name: array.astype(BF16) for name, array in masters.items()})
            for array in masters.values():
                array *= array.dtype.type(1.01)


def test_a_source_that_is_another_is_read_anew() -> None:
    store, weights, worker = MemoryStore(), model(), model(1)
    sub = Subscriber(store)
    with Publisher(store) as pub:
        pub.publish(weights)
        weights = copied(weights)
        step(weights, 1)
        pub.publish(weights)
        weights["norm"] = weights["norm"] + BF16.type(1)
        pub.publish(weights)
        sub.sync(worker)
        assert equal(worker, weights)
        other = copied(worker)
        step(weights, 2)
        pub.publish(weights)
        sub.sync(other)
    assert equal(other, weights)


def test_a_publisher_keeps_no_weights_of_a_source_alive() -> None:
    weights = model()
    watched = weakref.ref(weights["embed"])
    with Publisher(MemoryStore()) as pub:
        pub.publish(weights)
        pub.publish(weights)
        del weights
        gc.collect()
        assert watched() is None


@pytest.mark.parametrize("change", ["dtype", "shape", "object", "name", "torch"])
def test_marks_see_that_a_source_is_another(change: str) -> None:
    torch = pytest.importorskip("torch")
    source: dict[str, Any] = {"a": np.zeros((2, 3), np.uint16), "b": torch.zeros(4)}
    marks = SourceMarks.of(source)
    assert marks is not None
    assert marks.fit(source)
    assert marks.fit(dict(source))
    if change == "dtype":
        source["a"].dtype = np.int16
    elif change == "shape":
        source["a"].shape = (3, 2)
    elif change == "object":
        source["a"] = source["a"].copy()
    elif change == "name":
        source["c"] = source.pop("a")
    else:
        source["b"].data = torch.ones(4)
    assert not marks.fit(source)


def test_what_has_no_plain_memory_has_no_marks() -> None:
    assert SourceMarks.of({"a": np.zeros((4, 4))[:, ::2]}) is None
    assert SourceMarks.of({"a": Placed(np.zeros(3), (6,), rows=(0, 3))}) is None


@pytest.mark.parametrize(
    "bundles",
    [
        [[[0]]],
        [[[0, 1], []]],
        [[[1, 0]]],
        [[[0, 1], [1, 2]]],
        [[[0, 9]]],
        [[[1, 2]], [[0, 3]]],
        [[[2, 3], [0, 1]]],
        [[[0, 4]]],
        [[[0, 5]]],
        [[[0, 6]]],
        [[0, 1]],
        {"0": 1},
    ],
    ids=[
        "one piece", "an empty group", "pieces that descend", "a piece twice", "no such piece", "bundles out of order",
        "groups out of order", "two dtypes", "a piece without weights", "more than a block", "no groups", "no list",
    ],
)  # fmt: skip
def test_what_is_no_bundle_is_refused(bundles: Any) -> None:
    specs = [("BF16", [5])] * 4 + [("F32", [5]), ("BF16", [0]), ("BF16", [1 << 20])]
    tensors = [{"dtype": dtype, "name": f"t{n}", "shape": shape} for n, (dtype, shape) in enumerate(specs)]
    table = {"bundles": bundles, "format": layouts.FORMAT, "tensors": tensors, "ties": {}}
    with pytest.raises(FormatError):
        layouts.parse(json.dumps(table, sort_keys=True, separators=(",", ":")).encode())


def test_one_tile_is_found_without_making_the_others() -> None:
    layout = layouts.bundle(layouts.make([*layouts.make(_specs()).tensors]))
    assert [layout.tile(n) for n in range(layout.tile_count)] == list(layout.tiles)
    assert [layout.tile(n).pieces for n in range(layout.tile_count)] == [tile.pieces for tile in layout.tiles]


def _specs() -> list[TensorSpec]:
    sizes = [100_000, 5, 70_000, 6, 7, 1 << 16, (1 << 16) - 1, 0, 3]
    return [TensorSpec(f"layers.{n % 2}.t{n}", ("BF16", "F32")[n == 4], (size,)) for n, size in enumerate(sizes)]
