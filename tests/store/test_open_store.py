import subprocess
import sys
from pathlib import Path

import pytest

from pulsesync import store as stores
from pulsesync.store import LocalStore, MemoryStore, ObjectStore, RetryStore, open_store


def test_the_public_names_are_these() -> None:
    assert stores.__all__ == [
        "CachedStore",
        "HttpStore",
        "LocalStore",
        "Location",
        "MemoryStore",
        "ObjectEntry",
        "ObjectStore",
        "RetryStore",
        "Store",
        "ThrottledStore",
        "forget",
        "open_store",
        "origin_of",
        "size_of",
    ]
    assert all(hasattr(stores, name) for name in stores.__all__)
    assert not hasattr(stores, "FtpStore")


def test_a_location_is_a_folder_with_or_without_a_scheme(tmp_path: Path) -> None:
    for location in (str(tmp_path), f"file://{tmp_path}"):
        store = open_store(location)
        assert isinstance(store, LocalStore)
        assert store.folder == tmp_path


def test_memory_is_a_store_by_name() -> None:
    assert isinstance(open_store("memory://a"), MemoryStore)
    assert open_store("memory://a") is open_store("memory://a")
    assert open_store("memory://a") is not open_store("memory://b")


@pytest.mark.parametrize("location", ["s3://bucket/run", "gs://bucket/run", "az://container/run"])
def test_clouds_are_tried_again(location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "somebody")
    store = open_store(location)
    assert isinstance(store, RetryStore)
    assert isinstance(store.store, ObjectStore)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_servers_are_tried_again(scheme: str) -> None:
    store = open_store(f"{scheme}://127.0.0.1:1/run")
    assert isinstance(store, RetryStore)
    assert isinstance(store.store, stores.HttpStore)


def test_an_unknown_scheme_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"must be one of .*file://.*memory://.*s3://.*https://; got ftp://"):
        open_store("ftp://host/run")


def test_importing_the_stores_imports_no_client() -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(stores.__file__).parents[2])!r}); import pulsesync.store\n"
    program += "print(*{'obstore', 'ssl', 'http', 'pytest', 'asyncio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_a_path_object_and_an_open_store_are_locations_too(tmp_path: Path) -> None:
    store = open_store(tmp_path / "run")
    assert isinstance(store, LocalStore)
    assert store.folder == tmp_path / "run"
    assert open_store(store) is store
