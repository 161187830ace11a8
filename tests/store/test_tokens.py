"""Which token a location is sent, from Python: the one for its origin, and no other."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pulsesync import Publisher, Subscriber, open_store
from pulsesync.errors import StoreError
from pulsesync.store import LocalStore, MemoryStore, RetryStore
from tests.commands import pulse
from tests.store.test_http import Place, answer, answering, moved

ORIGIN = "https://trainer:8765"


def sent(place: Place) -> set[str]:
    """The tokens that a server was sent."""
    lines = [line for request in place.requests for line in request.splitlines()]
    return {line.partition("Bearer ")[2] for line in lines if line.startswith("Authorization:")}


@pytest.fixture
def place() -> Iterator[Place]:
    with answering(lambda _: answer("404 Not Found")) as place:
        yield place


def test_a_run_behind_a_token_is_read_by_its_location_with_an_argument_and_with_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": np.arange(64, dtype=np.float32)}
    with Publisher(tmp_path / "run") as publisher:
        publisher.publish(weights)
    objects = {f"/run/{entry.relative_to(tmp_path / 'run')}": entry for entry in (tmp_path / "run").rglob("*")}

    def serve(request: str) -> bytes:
        if "Authorization: Bearer s3cret\r\n" not in request:
            return answer("401 Unauthorized")
        path = objects.get(request.split()[1])
        return answer("200 OK", path.read_bytes()) if path and path.is_file() else answer("404 Not Found")

    with answering(serve) as place:
        url = f"{place.url}/run"
        with pytest.raises(StoreError) as caught:
            Subscriber(url).sync({"w": np.zeros(64, np.float32)})
        assert f"or open_store, or set PULSE_SEND_TOKENS={place.url}=TOKEN" in str(caught.value)
        for token in ("s3cret", "s3cret\n"):
            with Subscriber(url, token=token) as subscriber:
                copy = {"w": np.zeros(64, np.float32)}
                assert subscriber.sync(copy).version == 0
                assert (copy["w"] == weights["w"]).all()
        monkeypatch.setenv("PULSE_SEND_TOKENS", f"{ORIGIN}=other\n{place.url}=s3cret\n")
        with Subscriber(url) as subscriber:
            assert subscriber.sync({"w": np.zeros(64, np.float32)}).version == 0
        assert open_store(url).get("head") == open_store(url, token="s3cret").get("head")


def test_a_token_of_the_environment_goes_to_its_origin_alone(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    port = place.url.rpartition(":")[2]
    monkeypatch.setenv("PULSE_TOKEN", "mine")  # what readers of this machine's own server must send
    other = [f"https://127.0.0.1:{port}", f"http://localhost:{port}", f"http://127.0.0.1:{int(port) ^ 1}", ORIGIN]
    monkeypatch.setenv("PULSE_SEND_TOKENS", " ".join(f"{origin}=s3cret" for origin in other))
    for command in ("status", "log", "verify", "inspect", "squash", "doctor --read-only", "prune", "point"):
        rest = ["stable", "0"] if command == "point" else []
        before = len(place.requests)
        pulse(*shlex.split(command), place.url, *rest)
        assert len(place.requests) > before
    with pytest.raises(StoreError):
        Subscriber(f"{place.url}/run").sync({"w": np.zeros(4, np.float32)})
    assert place.requests
    assert sent(place) == set()
    monkeypatch.setenv("PULSE_SEND_TOKENS", f"HTTP://127.0.0.1:{port}/=good {ORIGIN}=s3cret")
    assert pulse("log", f"{place.url}/run").code == 3
    assert sent(place) == {"good"}


def test_a_token_is_not_sent_where_a_server_redirects_to(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda _: moved(place.url)) as first:
        monkeypatch.setenv("PULSE_SEND_TOKENS", f"{first.url}=s3cret {place.url}=other")
        for token in (None, "argument"):
            with pytest.raises(StoreError, match="302"):
                open_store(first.url, token=token).get("head")
        assert sent(first) == {"s3cret", "argument"}
    assert place.requests == []


@pytest.mark.parametrize(
    "value",
    [
        "s3cret",
        "=s3cret",
        f"{ORIGIN}=",
        f"{ORIGIN}/run=s3cret",
        "trainer:8765=s3cret",
        "s3://bucket=s3cret",
        f"{ORIGIN}=s3cret {ORIGIN}:=s3cret",
        f"{ORIGIN}=s3cret1 {ORIGIN}/=s3cret2",
        f"{ORIGIN}?s3cret=s3cret",
        f"https://elsewhere=s3cret1,{ORIGIN}=s3cret2",
        f"https://elsewhere=s3cret1;{ORIGIN}=s3cret2",
        " \n",
    ],
)
def test_a_malformed_list_of_tokens_is_an_error_that_shows_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_SEND_TOKENS", value)
    with pytest.raises(ValueError, match="PULSE_SEND_TOKENS") as caught:
        open_store("https://elsewhere")
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert pulse("log", "https://elsewhere").refused(2, "PULSE_SEND_TOKENS")
    open_store("memory://tokens")  # which is sent none


def test_a_token_belongs_to_an_address_of_a_server_and_is_never_shown(tmp_path: Path) -> None:
    for location in (tmp_path, str(tmp_path), "s3://bucket/run", "memory://x", MemoryStore(), LocalStore(tmp_path)):
        with pytest.raises(ValueError, match="token=") as caught:
            open_store(location, token="s3cret")
        assert "s3cret" not in str(caught.value)
    for wrong in (3, b"s3cret", ["s3cret"]):
        with pytest.raises(TypeError, match="the token must be a text") as wrong_type:
            open_store("https://host", token=wrong)  # type: ignore[arg-type]
        assert "s3cret" not in str(wrong_type.value)
    for url in ("https://host/run?token=s3cret", "https://user:s3cret@host/run", "https://host/run#token=s3cret"):
        with pytest.raises(ValueError, match="must not contain") as caught:
            Subscriber(url)
        assert "s3cret" not in str(caught.value)
        done = pulse("status", url)
        assert done.code == 2
        assert "s3cret" not in done.out + done.err


def test_a_token_goes_in_clear_to_another_machine_only_if_the_environment_permits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for token in (None, "s3cret"):
        monkeypatch.setenv("PULSE_SEND_TOKENS", "http://192.0.2.7=s3cret")
        monkeypatch.delenv("PULSE_TOKEN_IN_CLEAR", raising=False)
        with pytest.raises(ValueError, match="PULSE_TOKEN_IN_CLEAR=1"):
            open_store("http://192.0.2.7", token=token)
        monkeypatch.setenv("PULSE_TOKEN_IN_CLEAR", "1")
        assert isinstance(open_store("http://192.0.2.7", token=token), RetryStore)
