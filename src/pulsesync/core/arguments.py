"""Checks of arguments, for public entries: each error names the argument, what it must be, and what was given.

A wrong type is a TypeError and a wrong value a ValueError. Numbers of numpy and torch are numbers.
"""

import math
import operator
import os
from collections.abc import Collection, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from pulsesync.core.location import parse_path

T = TypeVar("T", bound=str)


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number. A bool is none, and neither is a number with a fraction."""
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def whole(name: str, value: Any, least: int = 0, most: int | None = None, *, what: str = "a whole number") -> int:
    """Return a whole number within its limits. Raises: TypeError, ValueError."""
    limits = f", {least} or more" if most is None else f" from {least} to {most}"
    if not is_whole(value):
        raise TypeError(f"{name} must be {what}{limits}; got {shown(value)}")
    number = operator.index(value)
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be {what}{limits}; got {number}")
    return number


def optional_whole(name: str, value: Any, least: int = 0, *, what: str) -> int | None:
    """Return a whole number or None. Raises: as `whole`."""
    return None if value is None else whole(name, value, least, what=f"None or {what}")


def number(name: str, value: Any, *, what: str, above: float | None = None) -> float:
    """Return a number, 0 or more, which may be infinite; or one above a limit. Raises: TypeError, ValueError."""
    limits = ", 0 or more" if above is None else f" above {above:g}"
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be {what}{limits}; got {shown(value)}")
    found = float(value)
    if math.isnan(found) or (found < 0 if above is None else found <= above):
        raise ValueError(f"{name} must be {what}{limits}; got {shown(value)}")
    return found


def seconds(name: str, value: Any) -> float:
    """Return a number of seconds. Raises: TypeError, ValueError."""
    return number(name, value, what="a number of seconds")


def one_of(name: str, value: T, choices: Collection[str]) -> T:
    """Return one of these texts. Raises: ValueError."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {shown(value)}")
    return value


def folder(name: str, value: Any) -> Path:
    """Return the path of a folder. Raises: TypeError; ValueError, if it is empty, or a text as `parse_path` refuses."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be the path of a folder; got {shown(value)}")
    if value == "":
        raise ValueError(f"{name} must be the path of a folder; got an empty text")
    try:
        return parse_path(os.fspath(value))
    except ValueError as e:
        raise ValueError(f"{name} must be the path of a folder: {e}") from e


def mapping(name: str, value: Any, what: str) -> None:
    """Check that a value is None or a mapping. Raises: TypeError."""
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} must be None or a mapping of {what}; got {shown(value)}")


def function(name: str, value: Any) -> None:
    """Check that a value is None or can be called. Raises: TypeError."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be None or a function; got {shown(value)}")


def removed(call: str, given: Mapping[str, Any], advice: Mapping[str, str]) -> None:
    """Check that a call was given no argument that it does not have; advice: for those that it had. Raises: TypeError.

    A call takes these as `**_removed`.
    """
    for name in given:
        if name in advice:
            raise TypeError(f"{call} no longer takes {name}=: {advice[name]}")
        raise TypeError(f"{call} got an unexpected keyword argument {name!r}")


def shown(value: Any) -> str:
    """Show a value that is wrong: numbers and short texts as they are, otherwise its type."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    return f"a value of type {type(value).__name__}"
