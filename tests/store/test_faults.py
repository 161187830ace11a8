import random

import pytest

from pulsesync.errors import StoreError
from pulsesync.store import MemoryStore
from pulsesync.testing.faults import FaultyStore
from pulsesync.testing.stores import StoreTests


class TestFaultyStoreWithoutFaults(StoreTests):
    @pytest.fixture
    def store(self) -> FaultyStore:
        return FaultyStore(MemoryStore(), random.Random(0))


class Counting(MemoryStore):
    puts = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts += 1
        super().put(key, data)


def faulty(**chances: float) -> FaultyStore:
    return FaultyStore(Counting(), random.Random(0), **chances)


@pytest.mark.parametrize(("kind", "arrives"), [("lost", False), ("unanswered", True)])
def test_a_lost_request_does_not_arrive_and_a_lost_answer_does(kind: str, arrives: bool) -> None:
    store = faulty(**{kind: 1.0})
    with pytest.raises(StoreError) as caught:
        store.put("x/a", b"1")
    assert caught.value.retryable
    assert bool(list(store.store.list("x/"))) is arrives
    assert store.faults == {kind: 1}


def test_truncated_is_a_beginning_and_flipped_is_one_bit() -> None:
    data = bytes(range(200))
    for kind in ("truncated", "flipped"):
        store = faulty(**{kind: 1.0})
        store.put("a", data)
        for _ in range(50):
            got = store.get("a")
            if kind == "truncated":
                assert len(got) < len(data)
                assert data.startswith(got)
            else:
                wrong = int.from_bytes(got, "big") ^ int.from_bytes(data, "big")
                assert (len(got), wrong.bit_count()) == (len(data), 1)
        assert store.faults[kind] == 50


def test_stale_is_what_was_before_the_last_put() -> None:
    store = faulty(stale=1.0)
    store.put("head", b"1")
    assert store.get("head") == b"1"
    store.put("head", b"22")
    assert store.get("head") == b"1"
    store.put("head", b"333")
    assert store.get("head", 1) == b"2"
    assert store.faults["stale"] == 2


def test_doubled_puts_arrive_twice() -> None:
    store = faulty(doubled=1.0)
    store.put("a", b"1")
    assert isinstance(store.store, Counting)
    assert store.store.puts == 2


def test_the_same_seed_fails_the_same_way() -> None:
    def outcomes(seed: int) -> list[bool]:
        store = FaultyStore(MemoryStore(), random.Random(seed), lost=0.5)
        return [fails(store) for _ in range(50)]

    assert outcomes(1) == outcomes(1) != outcomes(2)


def fails(store: FaultyStore) -> bool:
    try:
        store.put("a", b"")
    except StoreError:
        return True
    return False
