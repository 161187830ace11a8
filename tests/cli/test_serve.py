"""Tokens on the command line: which are refused, and where one is sent."""

from pathlib import Path

import pytest

from tests.commands import pulse

FAR = "http://192.0.2.7:8765"  # an address that is nobody's: a test that asked it would fail otherwise


@pytest.mark.parametrize("command", [("serve", "."), ("relay", FAR), ("log", "http://127.0.0.1:1")])
def test_a_token_of_the_environment_that_is_empty_is_a_usage_error(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "")
    assert pulse(*command).refused(2, "PULSE_TOKEN has an empty token")


def test_an_upstream_token_of_the_environment_that_is_empty_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_UPSTREAM_TOKEN", "")
    assert pulse("relay", FAR).refused(2, "PULSE_UPSTREAM_TOKEN has an empty token")


def test_a_token_file_that_is_empty_or_not_there_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for name, saying in (("empty", "empty token"), ("none", "cannot read a token")):
        assert pulse("serve", tmp_path, "--token-file", tmp_path / name).refused(2, saying)
        assert pulse("relay", FAR, "--token-file", tmp_path / name).refused(2, saying)
        assert pulse("relay", FAR, "--upstream-token-file", tmp_path / name).refused(2, saying)


def test_an_empty_token_does_not_matter_where_none_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "")
    assert pulse("log", tmp_path).code == 3


@pytest.mark.parametrize("command", [("log", FAR), ("inspect", FAR), ("verify", FAR), ("follow", FAR, "folder")])
def test_no_command_sends_a_token_in_clear_to_another_machine(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "s3cret")
    assert pulse(*command).refused(2, "PULSE_TOKEN_IN_CLEAR=1")


@pytest.mark.parametrize("value", ["", "true", "2"])
def test_the_permission_to_send_a_token_in_clear_is_given_by_a_one(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PULSE_TOKEN", "s3cret")
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
    relay = ("relay", FAR, "--cache", tmp_path, "--host", "192.0.2.7")
    assert pulse(*relay).refused(2, "--upstream-token-in-clear")
    assert pulse(*relay, "--token-in-clear").refused(2, "--upstream-token-in-clear")
    assert pulse(*relay, "--upstream-token-in-clear").refused(1, "cannot listen")
