"""Tokens on the command line: which are refused, and where one is sent."""

from pathlib import Path

import pytest

from tests.commands import pulse

FAR = "http://192.0.2.7:8765"  # an address that is nobody's: a test that asked it would fail otherwise


@pytest.mark.parametrize("command", [("serve", "."), ("relay", FAR)])
def test_a_token_of_the_environment_that_is_empty_is_a_usage_error(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "")
    assert pulse(*command).refused(2, "the token in PULSE_TOKEN is empty")


def test_an_upstream_token_of_the_environment_that_is_empty_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "")
    assert pulse("relay", FAR).refused(2, "PULSE_UPSTREAM_TOKEN is empty")


def test_a_token_file_that_is_empty_or_not_there_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for name, saying in (("empty", "is empty"), ("none", "cannot read a token")):
        assert pulse("serve", tmp_path, "--token-file", tmp_path / name).refused(2, saying)
        assert pulse("relay", FAR, "--token-file", tmp_path / name).refused(2, saying)
        assert pulse("relay", FAR, "--upstream-token-file", tmp_path / name).refused(2, saying)


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (("log", FAR, "--token=s3cret"), "Unknown option: --token"),
        (("log", FAR, "--api_key2=s3cret"), "Unknown option: --api_key2"),
        (("serve", ".", "--token-file", "s3cret"), "cannot read a token"),
        (("relay", FAR, "--upstream-token-file", "s3cret"), "cannot read a token"),
    ],
)
def test_a_token_in_a_wrong_place_is_not_repeated(arguments: tuple[str, ...], saying: str) -> None:
    done = pulse(*arguments)
    assert done.refused(2, saying)
    assert "s3cret" not in done.err


def test_a_relay_has_the_token_of_its_upstream_from_the_environment_of_all_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PULSE_SEND_TOKENS", f"{FAR}=s3cret")
    assert pulse("relay", FAR).refused(2, "--without-token")
    monkeypatch.setenv("PULSE_SEND_TOKENS", f"{FAR}=s3cret, http://a=b")
    assert pulse("relay", FAR).refused(2, "no commas")


def test_an_empty_token_does_not_matter_where_none_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "")
    monkeypatch.setenv("PULSE_SEND_TOKENS", "")
    assert pulse("log", "http://127.0.0.1:1").refused(2, "PULSE_SEND_TOKENS is set but empty")
    assert pulse("log", tmp_path).code == 3


@pytest.mark.parametrize("command", [("log", FAR), ("inspect", FAR), ("verify", FAR), ("follow", FAR, "folder")])
def test_no_command_sends_a_token_in_clear_to_another_machine(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_SEND_TOKENS", f"{FAR}=s3cret")
    assert pulse(*command).refused(2, "PULSE_TOKEN_IN_CLEAR=1")


@pytest.mark.parametrize("value", ["", "true", "2"])
def test_the_permission_to_send_a_token_in_clear_is_given_by_a_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_SEND_TOKENS", f"{FAR}=s3cret")
    monkeypatch.setenv("PULSE_TOKEN_IN_CLEAR", value)
    assert pulse("log", FAR).refused(2, "PULSE_TOKEN_IN_CLEAR must be 0 or 1")


def test_a_server_for_other_machines_asks_for_a_token_in_clear_only_if_that_is_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "s3cret")
    serve = ("serve", tmp_path, "--host", "192.0.2.7")
    assert pulse(*serve).refused(2, "--token-in-clear")
    assert pulse(*serve, "--token-in-clear").refused(1, "cannot listen")


def test_a_relay_shows_its_token_in_clear_only_if_that_is_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "s3cret")
    relay = ("relay", FAR, "--cache", tmp_path, "--host", "192.0.2.7", "--without-token")
    assert pulse(*relay).refused(2, "--upstream-token-in-clear")
    assert pulse(*relay, "--token-in-clear").refused(2, "--upstream-token-in-clear")
    assert pulse(*relay, "--upstream-token-in-clear").refused(1, "cannot listen")


def test_a_relay_opens_what_a_token_protects_to_everybody_only_if_that_is_permitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "s3cret")
    (tmp_path / "token").write_text("other")
    relay = ("relay", FAR.replace("http:", "https:"), "--cache", tmp_path, "--host", "192.0.2.7")
    assert pulse(*relay).refused(2, "--without-token")
    assert pulse("relay", "http://127.0.0.1:1", "--host", "127.0.0.1", "--port", "1").refused(2, "--without-token")
    assert pulse(*relay, "--without-token").refused(1, "cannot listen")
    readers = ("--token-file", tmp_path / "token", "--token-in-clear")
    assert pulse(*relay, *readers).refused(1, "cannot listen")
    assert pulse(*relay, *readers, "--without-token").refused(2, "contradicts")


def test_options_that_have_no_effect_on_an_upstream_are_usage_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "token").write_text("s3cret")
    relay = ("relay", tmp_path, "--cache", tmp_path / "cache", "--host", "192.0.2.7")
    assert pulse(*relay, "--upstream-token-file", tmp_path / "empty").refused(2, "is empty")
    assert pulse(*relay, "--upstream-token-file", tmp_path / "token").refused(2, "upstream only")
    assert pulse(*relay, "--upstream-token-in-clear").refused(2, "upstream only")
    for upstream in (tmp_path, FAR):
        assert pulse("relay", upstream, *relay[2:], "--cafile", tmp_path / "none").refused(2, "--cafile works with")
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "")
    assert pulse(*relay).refused(2, "PULSE_UPSTREAM_TOKEN is empty")


def test_a_size_that_is_none_and_a_certificate_without_its_key_are_usage_errors(tmp_path: Path) -> None:
    host = ("--host", "192.0.2.7")
    assert pulse("relay", tmp_path, *host, "--max-cache", "1.5GB").refused(2, "got '1.5GB'")
    assert pulse("relay", tmp_path, *host, "--certificate", tmp_path / "a").refused(2, "only one of the two")
    assert pulse("serve", tmp_path, *host, "--private-key", tmp_path / "a").refused(2, "only one of the two")
