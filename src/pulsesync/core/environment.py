"""Environment variables. One that is set but empty is an error: a value that got lost must not turn a check off."""

import os


def read_variable(name: str) -> str | None:
    """Return the value of a variable, stripped; None if it is not set. Raises: ValueError, if it is empty."""
    value = os.environ.get(name)
    if value is None:
        return None
    if not value.strip():
        raise ValueError(f"{name} is set but empty; give it a value, or unset it")
    return value.strip()


def read_list(name: str) -> tuple[str, ...] | None:
    """Return the values of a variable, between commas; None if it is not set. Raises: ValueError, if there are none."""
    value = read_variable(name)
    if value is None:
        return None
    values = tuple(one.strip() for one in value.split(",") if one.strip())
    if not values:
        raise ValueError(f"{name} must be values with commas between; got {value!r}: give it a value, or unset it")
    return values


def read_switch(name: str) -> bool:
    """Return True if a variable is 1, False if it is 0 or not set. Raises: ValueError, for anything else."""
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1; got {value!r}")
    return value == "1"
