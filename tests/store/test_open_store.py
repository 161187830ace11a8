import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from pulsesync import Publisher, Subscriber
from pulsesync import store as stores
from pulsesync.core.location import ParsedLocation
from pulsesync.store import LocalStore, MemoryStore, ObjectStore, RetryStore, open_store


def test_every_public_name_can_be_imported_and_no_other() -> None:
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


@given(
    st.lists(st.text(st.characters(blacklist_categories=["Cs"]), max_size=4), min_size=1, max_size=3),
    st.sampled_from(["", ".", "..", " ", "%2e", "\t"]),
)
def test_a_url_that_is_accepted_is_opened_where_its_names_say(names: list[str], more: str) -> None:
    text = "s3://bucket/" + "/".join((*names, more))
    try:
        at = ParsedLocation.parse(text)
    except ValueError:
        return
    opened = S3Store.from_url(at.url, region="us-east-1")
    assert (opened.prefix or "") == "/".join(at.segments)
    assert text.rstrip("/") == "/".join(("s3:/", at.authority, *at.segments))


def test_what_was_meant_as_something_else_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    weights = {"w": np.zeros(4, np.float32)}
    for location in ("s3:/b/run", "C:\\run", "", "s3://bucket/run%20", Path("s3:/b/run")):
        with pytest.raises(ValueError, match=r"location|path|URL"):
            Publisher(location).publish(weights)
    with Publisher("~/run") as publisher:
        publisher.publish(weights)
    with Publisher(Path("./run")) as publisher:
        publisher.publish(weights)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["run"]
    assert Subscriber("~/run").sync({"w": np.ones(4, np.float32)}).version == 0


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
