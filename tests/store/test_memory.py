from types import SimpleNamespace

import pytest

from pulsesync.store import MemoryStore, memory, open_store
from pulsesync.testing.stores import StoreTests


class TestMemoryStore(StoreTests):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_objects_are_dated_when_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    monkeypatch.setattr(memory, "time", SimpleNamespace(time=lambda: 100.0))
    store.put("x/a", b"")
    monkeypatch.setattr(memory, "time", SimpleNamespace(time=lambda: 200.0))
    store.create("x/b", b"")
    assert [entry.modified_s for entry in store.list("x/")] == [100.0, 200.0]


def test_what_is_changed_after_a_put_does_not_change_the_object() -> None:
    store, data = MemoryStore(), bytearray(b"one")
    store.put("a", memoryview(data))
    data[:] = b"two"
    assert store.get("a") == b"one"


def test_a_name_is_one_store_in_a_process() -> None:
    open_store("memory://this test").put("a", b"1")
    assert open_store("memory://this test").get("a") == b"1"
    assert list(open_store("memory://another").list("a/")) == []
