"""One suite for every store.

Subclass it, give it a store, and pytest runs all of it:

    class TestMyStore(StoreTests):
        @pytest.fixture
        def store(self):
            return MyStore(...)
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event
from typing import TypeVar

import pytest

from pulsesync.errors import ConflictError, NotFoundError, StoreError
from pulsesync.store import ObjectEntry, Store, size_of

NOT_KEYS = ["", "/", "/etc/passwd", "../x", "a/../../x", "a/..", "./a", "a//b", "a/", "..\\x", "a\\..\\x", "a\0b"]
NOT_PREFIXES = ["", "/", "../", "a/../../", "//", "a//", "parts"]
TEN = b"0123456789"
RANGES = [(0, None), (0, 10), (0, 4), (3, 7), (3, None), (9, 10), (4, 99), (0, 99), (10, None), (10, 20), (11, 12)]
RANGES += [(99, None), (0, 0), (5, 5), (7, 3), (0, 1 << 40)]
T = TypeVar("T")


class StoreTests:
    """Tests of what the store protocol promises. The fixture `store` is a fresh and empty store for each test.

    Attributes:
        clock_slack_s: how far the store's clock may differ from this process's, including the rounding of its dates.
        large_bytes: size of the largest object; above the size from which the store splits uploads, if it does.
        races: how many times sixteen threads try to create the same object.
    """

    clock_slack_s = 5.0
    large_bytes = 3_000_001
    races = 3

    def test_what_was_put_is_got(self, store: Store) -> None:
        store.put("parts/a", b"one")
        assert store.get("parts/a") == b"one"

    def test_put_replaces(self, store: Store) -> None:
        store.put("head", b"100")
        store.put("head", b"2")
        assert store.get("head") == b"2"

    def test_put_takes_a_memoryview(self, store: Store) -> None:
        store.put("parts/a", memoryview(TEN)[2:5])
        assert store.get("parts/a") == b"234"

    def test_every_byte_comes_back_from_a_large_object(self, store: Store) -> None:
        data = random.Random(1).randbytes(self.large_bytes)
        store.put("parts/large", data)
        assert store.get("parts/large") == data
        assert store.get("parts/large", self.large_bytes - 10) == data[-10:]

    def test_a_large_object_is_created_whole(self, store: Store) -> None:
        data = random.Random(2).randbytes(self.large_bytes)
        store.create("anchors/large", data)
        assert store.get("anchors/large") == data

    def test_keys_come_back_as_they_were(self, store: Store) -> None:
        keys = ["head", "a/b/c", "a b", "ü/é", "a+b", "a%20b", "a=b&c", "0123456789abcdef" * 4]
        for number, key in enumerate(keys):
            store.put(f"x{number}/{key}", key.encode())
        for number, key in enumerate(keys):
            assert store.get(f"x{number}/{key}") == key.encode(), key
            assert [entry.key for entry in store.list(f"x{number}/")] == [f"x{number}/{key}"]

    def test_a_range_is_what_a_slice_would_be(self, store: Store) -> None:
        for kind in ("parts", "manifests"):
            for number, (begin, end) in enumerate(RANGES):  # each of an object of its own, which no cache has
                store.put(f"{kind}/{number}", TEN)
                for reading in ("the first time", "again, perhaps from a cache"):
                    assert store.get(f"{kind}/{number}", begin, end) == TEN[begin:end], (kind, begin, end, reading)

    def test_a_range_is_served_before_and_after_the_whole(self, store: Store) -> None:
        store.put("parts/a", TEN)
        assert store.get("parts/a", 2, 5) == b"234"
        assert store.get("parts/a") == TEN
        assert store.get("parts/a", 4, 6) == b"45"

    def test_an_empty_object_has_nothing_in_any_range(self, store: Store) -> None:
        for number, (begin, end) in enumerate([(0, None), (0, 5), (0, 0), (3, None), (3, 5)]):
            store.put(f"parts/{number}", b"")
            assert store.get(f"parts/{number}", begin, end) == b"", (begin, end)

    def test_the_size_of_an_object_is_known(self, store: Store) -> None:
        for key, size in (("head", 0), ("head", 10), ("parts/a", 0), ("parts/a", 10), ("parts/a", self.large_bytes)):
            store.put(key, bytes(size))
            for reading in ("the first time", "again, perhaps from a cache"):
                assert size_of(store, key) == size, (key, reading)
            store.delete(key)
            with pytest.raises(NotFoundError):
                size_of(store, key)

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        for key in ("head", "manifests/0", "parts/b", "a/b/c"):
            for begin, end in ((0, None), (0, 5), (2, 2), (3, None)):
                with pytest.raises(NotFoundError) as caught:
                    store.get(key, begin, end)
                assert (caught.value.key, caught.value.retryable) == (key, False), (begin, end)

    def test_create_creates_once(self, store: Store) -> None:
        store.create("manifests/0", b"first")
        for data in (b"second", b"first"):
            with pytest.raises(ConflictError) as caught:
                store.create("manifests/0", data)
            assert caught.value.key == "manifests/0"
            assert not caught.value.retryable
        assert store.get("manifests/0") == b"first"

    def test_create_does_not_replace_what_was_put(self, store: Store) -> None:
        store.put("head", b"1")
        with pytest.raises(ConflictError):
            store.create("head", b"2")
        assert store.get("head") == b"1"

    def test_create_after_delete_creates(self, store: Store) -> None:
        store.create("manifests/0", b"1")
        store.delete("manifests/0")
        store.create("manifests/0", b"2")
        assert store.get("manifests/0") == b"2"

    def test_of_sixteen_threads_one_creates(self, store: Store) -> None:
        for attempt in range(self.races):
            won = in_threads(16, partial(created, store, f"manifests/{attempt}"))
            assert sum(won) == 1
            assert store.get(f"manifests/{attempt}") == content_of(won.index(True))

    def test_list_yields_what_is_below_a_prefix_in_order(self, store: Store) -> None:
        for key in ("parts/b", "parts/a", "manifests/1", "parts/c/d", "head", "partsy/a", "part/a"):
            store.put(key, b"")
        assert [entry.key for entry in store.list("parts/")] == ["parts/a", "parts/b", "parts/c/d"]
        assert [entry.key for entry in store.list("parts/c/")] == ["parts/c/d"]

    def test_list_sorts_by_key_across_folders(self, store: Store) -> None:
        keys = ["x/a", "x/a-b", "x/a0", "x/b/c", "x/b0"]
        for key in reversed(keys):
            store.put(key, b"")
        assert [entry.key for entry in store.list("x/")] == keys

    def test_an_entry_has_the_size_and_the_date_of_its_object(self, store: Store) -> None:
        store.put("parts/a", b"1")
        store.put("parts/a", TEN)
        store.put("parts/b", b"")
        first, second = store.list("parts/")
        assert (first.key, first.size_bytes, second.key, second.size_bytes) == ("parts/a", 10, "parts/b", 0)
        for entry in (first, second):
            assert isinstance(entry, ObjectEntry)
            assert abs(entry.modified_s - time.time()) < self.clock_slack_s

    def test_a_listing_is_complete(self, store: Store) -> None:
        keys = [f"parts/{number:03}" for number in range(120)]

        def put(name: int) -> None:
            for key in keys[name::8]:
                store.put(key, b"")

        in_threads(8, put)
        assert [entry.key for entry in store.list("parts/")] == keys

    def test_listing_where_nothing_is_yields_nothing(self, store: Store) -> None:
        assert list(store.list("parts/")) == []

    def test_what_was_deleted_is_gone(self, store: Store) -> None:
        store.put("parts/a", b"1")
        assert store.get("parts/a") == b"1"
        store.delete("parts/a")
        with pytest.raises(NotFoundError):
            store.get("parts/a")
        assert list(store.list("parts/")) == []

    def test_deleting_nothing_is_no_error(self, store: Store) -> None:
        store.put("parts/a", b"1")
        for _ in range(2):
            store.delete("parts/a")
        store.delete("nothing/there")

    def test_what_is_not_a_key_is_refused(self, store: Store) -> None:
        verbs: dict[str, Callable[[str], object]] = {
            "get": store.get,
            "get a range": lambda key: store.get(key, 1, 2),
            "delete": store.delete,
            "put": lambda key: store.put(key, b""),
            "create": lambda key: store.create(key, b""),
        }
        accepted = [(name, key) for name, verb in verbs.items() for key in NOT_KEYS if not refused(partial(verb, key))]
        assert accepted == []

    def test_what_is_not_a_prefix_is_refused(self, store: Store) -> None:
        for prefix in NOT_PREFIXES:
            with pytest.raises(StoreError):
                pytest.fail(f"{prefix!r} was listed: {list(store.list(prefix))}")

    def test_nobody_ever_sees_part_of_an_object(self, store: Store) -> None:
        sizes, done = (200_000, 200_001), Event()
        store.put("a/x", bytes(sizes[0]))

        def write() -> None:
            try:
                for turn in range(20):
                    store.put("a/x", bytes([turn]) * sizes[turn % 2])
            finally:
                done.set()

        def read() -> None:
            while not done.is_set():
                data = store.get("a/x")
                assert len(data) in sizes
                assert data == data[:1] * len(data)
                assert [(entry.key, entry.size_bytes in sizes) for entry in store.list("a/")] == [("a/x", True)]

        in_threads(3, lambda name: read() if name else write())


def refused(call: Callable[[], object]) -> bool:
    """Whether a call raises an error of the store that is no reason to try again."""
    try:
        call()
    except StoreError as e:
        return not e.retryable
    return False


def created(store: Store, key: str, name: int) -> bool:
    """Try to create an object with the content of a name. Returns whether this call created it."""
    try:
        store.create(key, content_of(name))
    except ConflictError:
        return False
    return True


def content_of(name: int) -> bytes:
    return str(name).encode() * 1000


def in_threads(count: int, work: Callable[[int], T]) -> list[T]:
    """Call work(0), work(1), … in as many threads, which all start at the same moment."""
    ready = Barrier(count)

    def one(name: int) -> T:
        ready.wait()
        return work(name)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))
