"""The cost model: which method a sync uses, given measured speeds."""

import ml_dtypes
import numpy as np
import pytest

from pulsesync.group.bundles import agree, describe_shards
from pulsesync.group.cost_model import (
    GPU_COPY_BYTES_S,
    METHODS,
    CostModel,
    EndpointTime,
    MethodCost,
    MethodTiming,
    TransferLoad,
)
from pulsesync.group.peers import DEVICE_BUCKET_WEIGHTS, LocalModel, SourceEnd
from pulsesync.state.sharding import shards_of

GBIT = 1e9 / 8


def costs(link: float) -> CostModel:
    """The costs of endpoints with two cores each, over a link of this many bytes per second."""
    return CostModel(byte_s=1 / link)


def load(weights: int, density: float) -> TransferLoad:
    return TransferLoad(weights, 2 * weights, density * weights)


@pytest.mark.parametrize(
    ("gbit", "density", "method"),
    [(0.02, 0.01, "coded"), (0.02, 0.1, "coded"), (1, 0.001, "plain"), (200, 0.4, "dense"), (0.01, 0.4, "coded")],
)
def test_slow_links_pay_for_coding_and_fast_ones_do_not(gbit: float, density: float, method: str) -> None:
    assert set(costs(gbit * GBIT).choose([load(10_000_000, density)] * 5)) == {method}


def test_a_method_in_use_is_left_only_for_one_that_is_clearly_quicker() -> None:
    there = load(10_000_000, 0.01)
    by_link = {gbit: costs(gbit * GBIT) for gbit in (0.01, 0.1, 1, 10)}
    for known in by_link.values():
        known.last = "gap"
        chosen = known.choose([there])[0]
        others = min(known.seconds(method, there) for method in METHODS if method != "gap")
        assert (chosen == "gap") == (known.seconds("gap", there) <= 1.2 * others)
    assert {known.choose([there])[0] for known in by_link.values()} > {"gap"}


def test_a_tensor_that_changes_everywhere_goes_whole_beside_others_that_are_coded() -> None:
    loads = [load(50_000_000, 0.001)] * 3 + [load(50_000_000, 1.0)]
    assert costs(1.5 * GBIT).choose(loads)[-1] == "dense"
    assert "dense" not in costs(1.5 * GBIT).choose(loads)[:-1]


def test_what_a_sync_really_took_moves_the_estimate_there() -> None:
    known = costs(GBIT)
    there = load(1_000_000, 0.01)
    for _ in range(20):
        known.learn("coded", there, MethodTiming(0.5, 0.25, 1.5, 12_345))
    cost = known.methods["coded"]
    assert cost.source.of(there) == pytest.approx(0.5, rel=0.01)
    assert cost.receiver.of(there) == pytest.approx(0.25, rel=0.01)
    assert cost.wire_bytes(there) == pytest.approx(12_345)
    assert known.seconds("coded", there) == pytest.approx(1.5, rel=0.01)


def test_methods_that_were_not_tried_are_thought_to_be_off_as_the_others_are() -> None:
    known, there = costs(GBIT), load(1_000_000, 0.01)
    before = known.seconds("gap", there)
    known.learn("plain", there, MethodTiming(0.01, 0.01, 1.0, 60_000))
    assert known.seconds("gap", there) == pytest.approx(before * known.off["plain"])


def test_a_link_that_held_nothing_up_shows_only_that_it_is_not_slower() -> None:
    known = costs(GBIT)
    known.learn_link(1000, 0.1, others_s=0.5)  # too few bytes to describe_shards
    assert known.byte_s == 1 / GBIT
    known.learn_link(10_000_000, 0.01, others_s=0.5)
    assert known.byte_s == pytest.approx(1e-9)
    for _ in range(20):
        known.learn_link(10_000_000, 1.0, others_s=0.5)
    assert known.byte_s == pytest.approx(1e-7, rel=0.01)


def test_codecs_are_tried_on_the_models_own_weights() -> None:
    rng = np.random.default_rng(0)
    values = (0.02 * rng.standard_normal(1 << 18)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    model = LocalModel(shards_of({"w": bits.view(ml_dtypes.bfloat16)}), (), None)
    wire = agree([describe_shards(model.shards)] * 2, [0])
    known = CostModel()
    SourceEnd(wire, wire.owned_by(0), model).calibrate(known, receivers_on_gpu=False)
    for method in METHODS:
        cost = known.methods[method]
        assert 0 < cost.source.of(load(1_000_000, 0.01)) < 10
        assert cost != CostModel().methods[method]


def test_more_buckets_hide_more_of_the_shorter_stages() -> None:
    known = CostModel(
        {"dense": MethodCost(EndpointTime(1e-8, 0), EndpointTime(1e-8, 0), EndpointTime(0, 0), None)},
        byte_s=1e-8,
        bucket_weights={"dense": 1 << 20},
    )
    assert known.seconds("dense", load(1 << 20, 0)) == pytest.approx(0.042, rel=0.01)
    assert known.seconds("dense", load(1 << 24, 0)) == pytest.approx(0.336 * (1 + 1 / 16), rel=0.01)


@pytest.mark.parametrize("link", [0.1 * GBIT, GBIT, 10 * GBIT, 400e9])
def test_on_gpus_the_codec_pays_on_slow_links_and_not_on_the_fastest(link: float) -> None:
    known = CostModel(byte_s=1 / link, bucket_weights=dict(DEVICE_BUCKET_WEIGHTS))
    known.assume_gpu(GPU_COPY_BYTES_S, receivers_too=True)
    chosen = set(known.choose([load(16_000_000, 0.01)] * 475))  # 7.6 B
    assert chosen <= ({"coded"} if link < 400e9 else {"dense", "plain"})
    took = {method: known.seconds(method, load(475 * 16_000_000, 0.01)) for method in METHODS}
    assert min(took[method] for method in chosen) <= 1.1 * min(took.values())


def test_on_a_gpu_with_slower_memory_weights_and_changes_take_longer_and_buckets_do_not() -> None:
    known, slow = CostModel(), CostModel()
    known.assume_gpu(GPU_COPY_BYTES_S, receivers_too=True)
    slow.assume_gpu(GPU_COPY_BYTES_S / 4, receivers_too=True)
    for method in METHODS:
        fast, late = known.methods[method].source, slow.methods[method].source
        assert late.per_weight == pytest.approx(4 * fast.per_weight)
        assert late.per_change == pytest.approx(4 * fast.per_change)
        assert late.per_bucket == fast.per_bucket


def test_receivers_in_host_memory_stay_as_they_are_assumed() -> None:
    known = CostModel()
    known.assume_gpu(GPU_COPY_BYTES_S, receivers_too=False)
    assert known.methods["coded"].receiver == CostModel().methods["coded"].receiver
    assert known.methods["coded"].source != CostModel().methods["coded"].source


def test_nothing_is_chosen_for_no_tiles() -> None:
    assert CostModel().choose([]) == []
