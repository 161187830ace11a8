"""What a publisher in host memory compares with: all tiles of a model, or those that one rank owns."""

import threading
from typing import Any

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber
from pulsesync.core.types import Bits, Sum
from pulsesync.errors import StateError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format import patch
from pulsesync.format.layout import Layout
from pulsesync.format.patch import CodecName
from pulsesync.publish.anchor_coordinator import AnchorCoordinator
from pulsesync.publish.baseline import baseline_for
from pulsesync.publish.commit import root_record
from pulsesync.state.host import HostBackend
from pulsesync.state.sharding import Placed, Shards, TileShare, layout_of, owner_of, shards_of, share_of
from pulsesync.state.slices import find_places
from pulsesync.state.weights import WeightState
from pulsesync.store import MemoryStore

Arrays = dict[str, Any]
GRID: layouts.Grid = {"cut": (2, 3)}


def model(seed: int = 1) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "cut": rng.integers(0, 1 << 16, (40, 30), np.uint16),
        "empty": np.zeros((0, 5), np.float32),
        "flat": rng.standard_normal(70, np.float32),
        "scalar": np.array(seed, np.int64),
    }


def trained(weights: Arrays) -> Arrays:
    out = {name: array.copy() for name, array in weights.items()}
    out["cut"][::7, ::5] += 1
    out["flat"][3:9] *= 1.01
    return out


def flat(weights: Arrays) -> dict[str, Bits]:
    return {name: array.reshape(-1).view(f"u{array.itemsize}") for name, array in weights.items()}


def share_of_all(weights: Arrays, grid: layouts.Grid | None = None) -> tuple[TileShare, Shards]:
    shards = baseline_for(weights, None).read(weights, {})
    layout = layout_of([shards.windows], shards.ties, GRID if grid is None else grid)
    return share_of(layout, owner_of(layout, [shards.windows]), 0, shards), shards


def equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# All tiles


def test_a_share_of_all_tiles_has_no_slices_and_every_tensor_and_lies_where_a_complete_state_does() -> None:
    share, _ = share_of_all(model())
    assert share.whole
    assert share.slices is None
    assert list(share.windows) == [spec.name for spec in share.layout.tensors]
    assert share.copy_places == share.places == find_places(share.layout, {})


@pytest.mark.parametrize("codec", ["gap", "context", "history", "auto"])
def test_the_share_of_a_complete_model_gives_the_bytes_and_the_digest_of_its_states(codec: CodecName) -> None:
    """Those that encoding one state against the other gives, without shares or shards."""
    old, new = model(), trained(model())
    baseline, (share, shards) = baseline_for(old, None), share_of_all(old)
    state = baseline.copy(share, shards)
    alone = WeightState(HostBackend(share.layout, {name: bits.copy() for name, bits in flat(old).items()}))
    assert (state.whole, state.digest) == (True, alone.digest)
    root = root_record(None, 0, share.layout.id, state.digest, None, ())
    part, transition = baseline.compare(share, state, baseline.read(new, {}), codec).encode(root, codec)
    history = alone.history if codec in ("auto", "history") else None
    wanted = patch.encode(
        share.layout, share.layout.tiles, flat(old), flat(new), alone.sums, codec=codec, history=history
    )
    assert bytes(part.data) == bytes(wanted.data)
    state.commit(transition)
    assert state.digest == WeightState(HostBackend(share.layout, flat(new))).digest


def test_what_is_rebuilt_of_a_complete_model_is_the_source_in_its_full_shapes() -> None:
    weights = model()
    baseline, (share, shards) = baseline_for(weights, None), share_of_all(weights)
    rebuilt = baseline.rebuild(share, shards)
    assert rebuilt is not None
    assert equal(rebuilt, weights)
    assert all(rebuilt[name].dtype == weights[name].dtype for name in weights)
    assert not any(np.shares_memory(rebuilt[name], weights[name]) for name in weights)


# The tiles of one rank


def halves(weights: Arrays) -> tuple[Layout, list[Shards], dict[int, int]]:
    """Two ranks: columns of a matrix each, and everything else on both."""
    shards = []
    for begin, end in ((0, 12), (12, 30)):
        part = Placed(weights["cut"][:, begin:end].copy(), (40, 30), columns=(begin, end))
        mine = {**weights, "cut": part}
        shards.append(baseline_for(mine, None).read(mine, {}))
    everyones = [one.windows for one in shards]
    layout = layout_of(everyones)
    return layout, shards, owner_of(layout, everyones)


def test_what_is_rebuilt_of_a_share_is_the_source_in_the_windows_of_the_share() -> None:
    weights = model()
    layout, shards, owners = halves(weights)
    share = share_of(layout, owners, 1, shards[1])
    assert not share.whole
    rebuilt = baseline_for(weights, None).rebuild(share, shards[1])
    assert rebuilt is not None
    assert equal(rebuilt, {"cut": weights["cut"][:, 12:]})
    assert WeightState.attach(HostBackend, rebuilt, layout, share.slices).flats.keys() == {"cut"}


def test_the_shares_of_all_ranks_have_together_the_sums_of_the_model() -> None:
    weights = model()
    layout, shards, owners = halves(weights)
    baseline = baseline_for(weights, None)
    sums: dict[int, Sum] = {}
    for rank, mine in enumerate(shards):
        share = share_of(layout, owners, rank, mine)
        state = baseline.copy(share, mine)
        sums |= {tile.ordinal: state.sums[tile.ordinal] for tile in share.tiles}
    alone = WeightState(HostBackend(layout, flat(weights)))
    assert sums == {n: total for n, total in alone.sums.items() if layout.tiles[n].size}


# Publishers


def test_a_publisher_refuses_a_part_of_a_model_and_names_the_publisher_for_it() -> None:
    weights = model()
    part = {**weights, "cut": Placed(weights["cut"][:20], (40, 30), rows=(0, 20))}
    with Publisher(MemoryStore()) as pub, pytest.raises(StateError, match="ShardedPublisher") as caught:
        pub.publish(part)
    assert caught.value.tensor == "cut"
    assert pub.version is None


def test_a_publisher_refuses_a_part_of_a_model_that_was_complete_before() -> None:
    store, weights = MemoryStore(), model()
    with Publisher(store) as pub:
        pub.publish(weights)
        part = {**weights, "cut": Placed(weights["cut"][:20], (40, 30), rows=(0, 20))}
        with pytest.raises(StateError, match="ShardedPublisher"):
            pub.publish(part, step=1)
        assert pub.publish(trained(weights), step=1).version == 1


def test_a_publisher_takes_a_placed_tensor_that_is_complete() -> None:
    store, weights = MemoryStore(), model()
    with Publisher(store) as pub:
        pub.publish({**weights, "cut": Placed(weights["cut"].reshape(-1), (40, 30))})
        pub.publish(trained(weights), step=1)
    out = {name: np.zeros_like(array) for name, array in weights.items()}
    Subscriber(store).sync(out)
    assert equal(out, trained(weights))


def test_a_shard_that_changes_is_for_a_new_publisher_of_the_same_run() -> None:
    first, second = (shards_of({"w": Placed(np.zeros(4, np.float32), (8,), at)}) for at in ((0, 4), (4, 8)))
    layout = layout_of([first.windows, second.windows])
    share = share_of(layout, owner_of(layout, [first.windows, second.windows]), 0, first)
    other: Any = [4, 8]  # a list is as good as a tuple
    listed = shards_of({"w": Placed(np.zeros(4, np.float32), (8,), other)})
    with pytest.raises(StateError, match=r"another shard of 'w' .* resumes the run"):
        share.check(listed)
    with pytest.raises(StateError, match=r"another shard of 'w' .* resumes the run"):
        share.check(second)


def test_a_path_that_cannot_be_measured_leaves_what_was_counted() -> None:
    def look() -> Any:
        raise StoreError("no answer")

    unused: Any = None
    anchors = AnchorCoordinator(unused, unused, threading.RLock(), 1.0, look, unused)
    anchors._path_bytes = 12.0
    with pytest.raises(StoreError):
        anchors.measure(unused)
    assert anchors._path_bytes == 12.0
