"""Environment variables: unset is no value, empty is an error."""

import pytest

from pulsesync.core.environment import read_list, read_switch, read_variable

NAME = "PULSE_OF_A_TEST"


@pytest.mark.parametrize("value", ["", " ", "\n"])
def test_a_variable_that_is_set_but_empty_is_an_error(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_variable(NAME) is None
    assert read_list(NAME) is None
    assert not read_switch(NAME)
    monkeypatch.setenv(NAME, value)
    for read in (read_variable, read_list):
        with pytest.raises(ValueError, match=f"{NAME} is set but empty; give it a value, or unset it"):
            read(NAME)
    with pytest.raises(ValueError, match=f"{NAME} must be 0 or 1"):
        read_switch(NAME)


def test_a_list_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, " a, b ,,")
    assert read_list(NAME) == ("a", "b")
    monkeypatch.setenv(NAME, " , ")
    with pytest.raises(ValueError, match=f"{NAME} must be values with commas between; got ','"):
        read_list(NAME)


def test_a_switch_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, on in (("0", False), ("1", True)):
        monkeypatch.setenv(NAME, value)
        assert read_switch(NAME) is on
