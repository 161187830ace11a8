"""Predicted bytes against real patches."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync.publish.publisher import Publisher
from pulsesync.store import MemoryStore
from pulsesync.testing import AdamUpdates
from pulsesync_lab.study.predict.sizes import entropy_bits, of_contexts, predict_sizes, symbol_of
from tests.tiers import slow

SHAPES = {"one": (1024, 1024), "two": (512, 1024), "three": (1024,)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
CODECS = {"gap": 0.05, "context": 0.1, "history": 0.2, "dense": 0.05}  # and how far off they may be


def in_order(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    wide = bits.astype(np.int64)
    return np.where(wide >= 0x8000, 0x8000 - wide, wide)


def counted(old: Any, new: Any, before: Any) -> dict[str, Any]:
    """The counts of a step, given old and new weights and how far each moved in the step before."""
    distance = in_order(new) - in_order(old)
    changed, classes = distance != 0, (old & 0x7FFF) >> 7
    again = changed & (before != 0)
    return {
        "by_class": Counter(classes[changed].tolist()),
        "weights_by_class": Counter(classes.tolist()),
        "units": Counter(np.abs(distance[changed]).tolist()),
        "up": int((distance > 0).sum()),
        "again": int(again.sum()),
        "same_way": int((again & (distance * before > 0)).sum()),
    }


def steps(lr: float, scale: float, count: int) -> Iterator[tuple[dict[str, Any], Any]]:
    updates = AdamUpdates(SHAPES, lr=lr, scale=scale)
    state = updates.state()
    old, before = np.concatenate([a.ravel() for a in state.values()]), np.zeros(SIZE, np.int64)
    yield {}, state
    for _ in range(count):
        state = updates.step()
        new = np.concatenate([a.ravel() for a in state.values()])
        yield counted(old, new, before), state
        old, before = new, in_order(new) - in_order(old)


@pytest.mark.parametrize(("lr", "scale"), [(3e-6, 0.15), slow(1e-6, 0.02)])
def test_predictions_are_near_the_bytes_of_real_versions(lr: float, scale: float) -> None:
    publishers = {codec: Publisher(MemoryStore(), codec=codec, anchor_every=1e9) for codec in CODECS}  # type: ignore[arg-type]
    off: dict[str, list[float]] = {codec: [] for codec in CODECS}
    for counts, state in steps(lr, scale, 4):
        arrays = {name: bits.view(ml_dtypes.bfloat16) for name, bits in state.items()}
        real = {codec: publisher.publish(arrays).payload_bytes for codec, publisher in publishers.items()}
        if counts:
            told = predict_sizes(SIZE, len(SHAPES), "BF16", **counts)
            assert told["plain"] == pytest.approx(6 * sum(counts["by_class"].values()), rel=0.05)
            for codec in CODECS:
                off[codec].append(told[codec] / real[codec] - 1)
    for publisher in publishers.values():
        publisher.close()
    assert {codec: max(map(abs, off[codec])) < most for codec, most in CODECS.items()} == dict.fromkeys(CODECS, True), (
        off
    )


def nothing(**counts: Any) -> dict[str, int]:
    empty: dict[str, Any] = {"by_class": {}, "units": {}, "up": 0, "again": 0, "same_way": 0}
    return predict_sizes(1000, 2, "BF16", weights_by_class={120: 1000}, **{**empty, **counts})


def test_a_step_that_changes_nothing_costs_a_record() -> None:
    told = nothing()
    assert told["plain"] == told["gap"] == told["context"] == told["history"] < 1000
    assert told["dense"] > 1000


def test_memory_saves_only_where_weights_change_again_and_most_where_they_go_on() -> None:
    some = {"by_class": {120: 100}, "units": {1: 100}, "up": 50}
    first = nothing(**some)
    back = nothing(**some, again=50, same_way=25)
    on = nothing(**some, again=50, same_way=50)
    assert first["history"] == first["context"]
    assert on["history"] < back["history"] < back["context"] == first["context"]


def test_without_units_every_step_is_taken_for_one() -> None:
    some = {"by_class": {120: 100}, "up": 50}
    assert nothing(**some) == nothing(**some, units={1: 100})


def test_symbols_are_those_of_the_coder() -> None:
    assert symbol_of(np.array([1, 7, 8, 15, 16, 31, 32])).tolist() == [1, 7, 8, 8, 9, 9, 10]


def test_contexts_that_tell_more_cost_less() -> None:
    mixed = np.array([[60_000.0, 40_000.0]])
    told = np.array([[50_000.0, 10_000.0], [10_000.0, 30_000.0]])
    assert entropy_bits(np.array([[1.0, 1.0], [4.0, 0.0]])) == 2
    assert of_contexts(told, 100_000, 1) < of_contexts(mixed, 100_000, 1)


def test_rare_changes_are_named_and_do_not_make_their_class_hot() -> None:
    rare = of_contexts(np.array([[10_000_000.0, 100.0]]), 10_000_100, 1)
    assert rare == pytest.approx(of_contexts(np.array([[10_000_000.0, 0.0]]), 10_000_100, 1) + 300, abs=1)
