"""Shards: what a process holds of a model, in a checkpoint's coordinates."""

import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pulsesync.errors import FormatError, StateError
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import (
    Placed,
    Shards,
    layout_of,
    owner_of,
    shards_of,
    slices_of,
    tensor_parallel,
    windows_from,
    windows_to,
)
from pulsesync.state.slices import find_places
from pulsesync.state.weights import WeightState
from tests.helpers import weights_of

FULL = {
    "a": np.arange(60, dtype=np.uint16).reshape(10, 6),
    "n": np.arange(7, dtype=np.uint16),
    "s": np.array(3, np.uint16),
    "e": np.arange(48, dtype=np.uint16).reshape(4, 3, 4),
}


def rows(name: str, begin: int, end: int) -> Placed:
    return Placed(FULL[name][begin:end].copy(), FULL[name].shape, rows=(begin, end))


def columns(name: str, begin: int, end: int) -> Placed:
    table = FULL[name].reshape(FULL[name].shape[0], -1)
    return Placed(table[:, begin:end].copy(), FULL[name].shape, columns=(begin, end))


def told(*shards: Shards) -> list[Any]:
    return [windows_from(windows_to(one))[0] for one in shards]


def test_a_layout_is_cut_where_any_part_ends_and_the_first_holder_owns_a_tile() -> None:
    first = shards_of({"a": rows("a", 0, 4), "n": FULL["n"], "s": FULL["s"]})
    second = shards_of({"a": rows("a", 4, 10), "n": FULL["n"], "s": FULL["s"]})
    other = shards_of({"a": columns("a", 2, 4), "n": FULL["n"], "s": FULL["s"]})
    layout = layout_of(told(first, second, other))
    assert [(t.tensor.name, t.row, t.column, t.rows, t.columns) for t in layout.tiles] == [
        ("a", 0, 0, 4, 2),
        ("a", 0, 2, 4, 2),
        ("a", 0, 4, 4, 2),
        ("a", 4, 0, 6, 2),
        ("a", 4, 2, 6, 2),
        ("a", 4, 4, 6, 2),
        ("n", 0, 0, 7, 1),
        ("s", 0, 0, 1, 1),
    ]
    assert owner_of(layout, told(first, second, other)) == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0, 7: 0}


def test_weights_are_read_in_the_tiles_of_the_layout() -> None:
    mine = shards_of({"a": rows("a", 4, 10), "e": columns("e", 4, 12)})
    rest = shards_of({"a": rows("a", 0, 4), "e": columns("e", 0, 4)})
    layout = layout_of(told(mine, rest))
    weights = weights_of(mine, layout)
    for tile in layout.tiles:
        if tile.ordinal in weights.places:
            table = FULL[tile.tensor.name].reshape(tile.tensor.rows, -1)
            expected = table[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns].reshape(-1)
            assert np.array_equal(weights.block(tile, 0), expected)
    assert len(weights.places) == 2


def test_a_state_of_shards_holds_their_tiles_whole() -> None:
    mine = shards_of({"a": columns("a", 0, 3), "n": FULL["n"]})
    rest = shards_of({"a": columns("a", 3, 6), "s": FULL["s"]})
    layout = layout_of(told(mine, rest))
    flats = {name: view.flat for name, view in mine.published.views.items()}
    state = WeightState(HostBackend(layout, flats, places=find_places(layout, slices_of(mine.windows))))
    assert all(place.whole for place in state.places.values())
    assert {layout.tiles[n].tensor.name for n in state.places} == {"a", "n"}


def test_tensor_parallel_splits_evenly_by_rows_and_columns() -> None:
    state = {"up": np.zeros((4, 6), np.uint16), "down": np.zeros((6, 4), np.uint16), "norm": np.zeros(6, np.uint16)}
    windows = shards_of(tensor_parallel(state, 1, 3, rows=["up"], columns=["down"])).windows
    assert (windows["up"].tensor.shape, windows["up"].rows) == ((12, 6), (4, 8))
    assert (windows["down"].tensor.shape, windows["down"].columns) == ((6, 12), (4, 8))
    assert windows["norm"].local.shape == (6,)
    with pytest.raises(StateError, match="cannot be split by columns"):
        tensor_parallel(state, 0, 2, columns=["norm"])


def test_masters_are_cast_as_they_are_read() -> None:
    master = np.array([[1.0, 1.0039], [2.0, 2.1]], np.float32)
    mine = shards_of({"w": Placed(master, (4, 2), rows=(2, 4))}, cast={"*": "BF16"})
    rest = shards_of({"w": Placed(master, (4, 2), rows=(0, 2))}, cast={"*": "BF16"})
    layout = layout_of(told(mine, rest))
    assert weights_of(mine, layout).block(layout.tiles[1], 0).tolist() == [0x3F80, 0x3F80, 0x4000, 0x4006]


@pytest.mark.parametrize(
    ("placed", "what"),
    [
        (Placed(np.zeros((3, 6), np.uint16), (10, 6), rows=(0, 4)), "has 18 local weights"),
        (Placed(np.zeros((4, 6), np.uint16), (10, 6), rows=(8, 12)), "has no slice 8:12: its size is 10"),
        (Placed(np.zeros((10, 2), np.uint16), (10, 6), columns=(5, 7)), "has no slice 5:7: its size is 6"),
    ],
)
def test_a_part_that_does_not_fit_its_tensor_is_refused(placed: Placed, what: str) -> None:
    with pytest.raises(StateError, match=what):
        shards_of({"a": placed})


def test_processes_with_different_tensors_by_one_name_are_refused() -> None:
    other = shards_of({"a": np.zeros((10, 6), np.uint32)})
    with pytest.raises(StateError, match="tensor 'a' is U16"):
        layout_of(told(shards_of({"a": FULL["a"]}), other))


def test_what_nobody_holds_is_named() -> None:
    some = told(shards_of({"a": rows("a", 0, 4)}), shards_of({"a": rows("a", 6, 10)}))
    with pytest.raises(StateError, match="no process has rows 4 to 6 of tensor 'a'"):
        owner_of(layout_of(some), some)


@pytest.mark.parametrize("data", [b"", b"x", b"\x78\x01junk", zlib.compress(b'{"tensors": [[1]]}')])
def test_a_list_of_shards_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match="list of shards"):
        windows_from(data)


def test_names_with_pattern_signs_stand_for_themselves() -> None:
    odd = {"layers[0].*": np.zeros(3, np.uint16), "layers0.x": np.zeros(4, np.uint16)}
    mine = shards_of({"layers[0].*": odd["layers[0].*"]})
    layout = layout_of(told(shards_of(odd)))
    places = find_places(layout, slices_of(mine.windows))
    state = WeightState(HostBackend(layout, {"layers[0].*": odd["layers[0].*"]}, places=places))
    assert {layout.tiles[n].tensor.name for n in state.places} == {"layers[0].*"}


@given(st.lists(st.integers(1, 39), max_size=4), st.lists(st.integers(1, 29), max_size=4))
def test_any_two_splits_of_a_tensor_meet_in_one_layout(by_rows: list[int], by_columns: list[int]) -> None:
    whole = np.arange(1200, dtype=np.uint16).reshape(40, 30)
    r, c = sorted({0, 40, *by_rows}), sorted({0, 30, *by_columns})
    sources = [shards_of({"w": Placed(whole[a:b].copy(), (40, 30), rows=(a, b))}) for a, b in pairwise(r)]
    takers = [shards_of({"w": Placed(whole[:, a:b].copy(), (40, 30), columns=(a, b))}) for a, b in pairwise(c)]
    everyones = told(*sources, *takers)
    layout = layout_of(everyones)
    owners = owner_of(layout, everyones[: len(sources)])
    read = np.zeros_like(whole)
    for tile in layout.tiles:
        block = weights_of(sources[owners[tile.ordinal]], layout).block(tile, 0)
        read[tile.row : tile.row + tile.rows, tile.column : tile.column + tile.columns] = block.reshape(tile.rows, -1)
    assert np.array_equal(read, whole)


def test_a_dtensor_with_a_partial_placement_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        value = DTensor.from_local(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Partial()])
        with pytest.raises(StateError, match="'w': DTensor has a Partial placement") as caught:
            shards_of({"w": value})
    finally:
        distributed.destroy_process_group()
    assert caught.value.tensor == "w"
