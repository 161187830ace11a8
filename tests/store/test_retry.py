import random
from collections.abc import Iterator
from itertools import islice

import pytest

from pulsesync.errors import ConflictError, LimitError, NotFoundError, StoreError
from pulsesync.store import MemoryStore, ObjectEntry, RetryStore, retry
from pulsesync.testing.faults import FaultyStore
from pulsesync.testing.stores import StoreTests


class TestRetryStore(StoreTests):
    @pytest.fixture
    def store(self) -> RetryStore:
        return RetryStore(MemoryStore())


class TestRetryStoreOverAFaultyOne(StoreTests):
    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> RetryStore:
        monkeypatch.setattr(retry, "ATTEMPTS", 30)
        monkeypatch.setattr(retry, "sleep", lambda _: None)
        return RetryStore(FaultyStore(MemoryStore(), random.Random(3), lost=0.2, unanswered=0.2, doubled=0.2))


class Failing(MemoryStore):
    """Fails the given number of times, before or after the operation is done."""

    def __init__(self, times: int, *, after: bool = False, error: type[StoreError] = StoreError) -> None:
        super().__init__()
        self.left, self.after, self.error, self.calls = times, after, error, 0

    def create(self, key: str, data: bytes) -> None:
        self.calls += 1
        if self.left and self.after:
            super().create(key, data)
        self.fail(key)
        super().create(key, data)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self.calls += 1
        self.fail(key)
        return super().get(key, begin, end)

    def fail(self, key: str) -> None:
        if self.left:
            self.left -= 1
            raise self.error("on purpose", key=key, retryable=self.error is StoreError)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited, always for as long as it may be."""
    waited: list[float] = []
    monkeypatch.setattr(retry, "sleep", waited.append)
    monkeypatch.setattr(retry, "random", lambda: 1.0)
    return waited


def test_waits_double_up_to_the_longest(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "ATTEMPTS", 9)
    store = Failing(8)
    store.put("a", b"1")
    assert RetryStore(store).get("a") == b"1"
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_waits_are_spread_from_nothing_to_all_of_it(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([0.0, 0.25, 0.75])
    monkeypatch.setattr(retry, "random", lambda: next(draws))
    store = Failing(3)
    store.put("a", b"1")
    RetryStore(store).get("a")
    assert waits == pytest.approx([0.0, 0.05, 0.3])


def test_after_the_last_attempt_its_error_is_raised(waits: list[float]) -> None:
    store = Failing(99)
    with pytest.raises(StoreError, match="on purpose"):
        RetryStore(store).get("a")
    assert (store.calls, len(waits)) == (5, 4)


@pytest.mark.parametrize("error", [NotFoundError, ConflictError])
def test_what_will_not_change_is_not_tried_again(error: type[StoreError], waits: list[float]) -> None:
    store = Failing(1, error=error)
    with pytest.raises(error):
        RetryStore(store).get("a")
    assert (store.calls, waits) == (1, [])


@pytest.mark.usefixtures("waits")
def test_a_create_that_arrived_without_an_answer_succeeds() -> None:
    store = Failing(1, after=True)
    RetryStore(store).create("manifests/0", b"mine")
    assert store.get("manifests/0") == b"mine"


@pytest.mark.usefixtures("waits")
def test_a_create_that_somebody_else_won_meanwhile_is_a_conflict() -> None:
    store = Failing(1)
    MemoryStore.create(store, "manifests/0", b"theirs")
    with pytest.raises(ConflictError):
        RetryStore(store).create("manifests/0", b"mine")


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("theirs", [b"min", b"mine and more"])
def test_an_object_that_only_begins_the_same_is_a_conflict(theirs: bytes) -> None:
    store = Failing(1)
    MemoryStore.create(store, "manifests/0", theirs)
    with pytest.raises(ConflictError):
        RetryStore(store).create("manifests/0", b"mine")


def test_the_same_bytes_by_somebody_else_are_a_conflict_at_the_first_attempt() -> None:
    store = MemoryStore()
    store.create("manifests/0", b"mine")
    with pytest.raises(ConflictError):
        RetryStore(store).create("manifests/0", b"mine")


@pytest.mark.usefixtures("waits")
def test_an_object_that_came_and_went_is_a_conflict() -> None:
    class Vanishing(Failing):
        def create(self, key: str, data: bytes) -> None:
            self.fail(key)
            raise ConflictError("there it was", key=key)

    with pytest.raises(ConflictError):
        RetryStore(Vanishing(1)).create("manifests/0", b"mine")


def test_a_listing_that_breaks_off_continues_after_the_last_key_and_does_not_grow_without_end(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Breaking(MemoryStore):
        """Each listing breaks off after three more objects than the one before."""

        listings = 0

        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            self.listings += 1
            yield from islice(super().list(prefix), 3 * self.listings)
            raise StoreError("on purpose", key=prefix, retryable=self.listings < 4)

    store = Breaking()
    for i in range(20):
        store.put(f"parts/{i:02d}", b"")
    with pytest.raises(StoreError, match="on purpose"):
        list(RetryStore(store).list("parts/"))
    assert len(waits) == 3
    store.listings = 0
    entries = RetryStore(store).list("parts/")
    assert [next(entries).key for _ in range(12)] == [f"parts/{i:02d}" for i in range(12)]
    assert store.listings == 4
    monkeypatch.setattr("pulsesync.store.retry.MAX_ENTRIES", 7)
    store.listings = 0
    with pytest.raises(LimitError, match="more than 7 objects"):
        list(RetryStore(store).list("parts/"))
