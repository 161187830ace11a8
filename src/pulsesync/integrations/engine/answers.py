"""What an engine's server answers, checked before it is used: it can be damaged, or come from another program."""

import json
from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeAlias

from pulsesync.core.text import one_line, printable
from pulsesync.errors import StoreError

Fields: TypeAlias = Mapping[str, tuple[type, ...]]  # of an answer, by name: the types that each may have

ERROR: Fields = {"type": (str,), "message": (str,)}
STATUS: Fields = {
    "location": (str, NoneType),
    "version": (int, NoneType),
    "update": (str, NoneType),
    "failure": (dict, NoneType),
    "broken": (str, NoneType),
    "ranks_agree": (bool,),
}
RANK_STATUS: Fields = {
    **{name: types for name, types in STATUS.items() if name != "ranks_agree"},
    "digest": (str, NoneType),
    "token": (str, NoneType),
}
RANK_REPORT: Fields = {
    "version": (int,),
    "step": (int,),
    "from_version": (int, NoneType),
    "path": (list,),
    "changed": (int,),
    "fetched_bytes": (int,),
    "seconds": (int, float),
    "digest": (str,),
    "mode": (str,),
    "repaired": (list,),
}
REPORT: Fields = {**RANK_REPORT, "pause_s": (int, float), "ranks": (int,)}

_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
_NAMES |= {dict: "an object", NoneType: "null"}
_MAX_NUMBER = 1 << 63
_MAX_TEXT = 1 << 16
_SHOWN = 80  # characters of an unexpected value, in the error


def parse_answer(data: bytes) -> dict[str, Any]:
    """Parse the body of an answer, with texts of one line; what is not a JSON object becomes its `detail`."""
    try:
        answer = json.loads(data or b"{}", object_hook=lambda table: {name: _one_line(table[name]) for name in table})
    except (ValueError, RecursionError):
        answer = data[:500].decode(errors="replace")
    return answer if isinstance(answer, dict) else {"detail": answer}


def _one_line(value: Any) -> Any:
    """Return a text, or the texts of a list, on one line; an object inside a list has got its own already."""
    if isinstance(value, list):
        return [one_line(one) if isinstance(one, str) else one for one in value]
    return one_line(value) if isinstance(value, str) else value


def check_fields(answer: Any, fields: Fields) -> dict[str, Any]:
    """Return an answer that has these fields, and perhaps more. Raises: StoreError, retryable, if it does not."""
    if not isinstance(answer, dict):
        raise _malformed("an object", answer)
    for name, types in fields.items():
        if not _is_one(value := answer.get(name, ...), types):
            expected = " or ".join(dict.fromkeys(_NAMES[type_] for type_ in types))
            raise _malformed(f"{expected} as {name!r}", value)
    return answer


def check_ranks(answers: Any, fields: Fields) -> list[dict[str, Any]]:
    """Return the answers of all ranks: each has these fields, or an error. Raises: StoreError, as `check_fields`."""
    if not isinstance(answers, list) or not answers:
        raise _malformed("a list of the answers of all ranks", answers)
    for answer in answers:
        if not has_error(answer):
            check_fields(answer, fields)
    return answers


def has_error(answer: Any) -> bool:
    """Return whether an answer is an error of a rank, with its class. Raises: StoreError, if the error is malformed."""
    if not isinstance(answer, dict) or "error" not in answer:
        return False
    check_fields(answer["error"], ERROR)
    return True


def _malformed(expected: str, got: Any) -> StoreError:
    found = "nothing" if got is ... else _NAMES[type(got)] if isinstance(got, dict | list) else repr(got)
    error = StoreError(f"the answer is malformed: expected {expected}, got {printable(found, _SHOWN)}", retryable=True)
    return error.advise("Check that this is the engine's server, with the same version of pulsesync installed")


def _is_one(value: Any, types: tuple[type, ...]) -> bool:
    if type(value) not in types:  # exactly: a bool is an int, too
        return False
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    if isinstance(value, list):
        return all(isinstance(one, str) and len(one) <= _MAX_TEXT for one in value)
    return not isinstance(value, int | float) or 0 <= value < _MAX_NUMBER  # also false for NaN
