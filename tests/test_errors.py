"""The errors as an interface: what a caller can read, and that nothing of it is lost between processes."""

import inspect
import pickle
import re
from collections.abc import Iterator
from typing import Any, assert_type, get_type_hints

import pytest

from pulsesync import errors
from pulsesync.cli.options import NothingThereError, UsageError
from pulsesync.errors import ChecksumError, FormatError, GroupError, PulseError, StoreError

PUBLIC: list[type[PulseError]] = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PulseError)
]
ALL: list[type[PulseError]] = [*PUBLIC, UsageError, NothingThereError]
EXAMPLES: dict[object, Any] = {str | None: "abc", int | None: 7, bool: True}  # by the type of a field
LATER = {"failed_rank": None, "place": None, "advice": None}  # of every error; mostly set after it was raised


def fields_of(kind: type[PulseError]) -> dict[str, Any]:
    """The facts that a class and its bases declare, each with a value of its type."""
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in {*LATER, "_facts"}}
    return {name: EXAMPLES[hint] for name, hint in hints.items()}


def test_every_field_can_be_read_whether_it_was_given_or_not() -> None:
    for kind in ALL:
        given = fields_of(kind)
        assert vars(kind("why", **given)) == {**LATER, **given}
        assert vars(kind("why")) == {**LATER, **{name: False if v is True else None for name, v in given.items()}}


def test_an_error_has_the_fields_of_its_base() -> None:
    for kind in ALL:
        for base in kind.__mro__:
            if issubclass(base, PulseError):
                assert fields_of(base).keys() <= fields_of(kind).keys()


def test_the_fields_of_an_error_are_explained_where_it_is_declared() -> None:
    for kind in PUBLIC:
        explained = "".join(inspect.getdoc(base) or "" for base in kind.__mro__ if issubclass(base, PulseError))
        for name in vars(kind("why")):
            assert re.search(rf"^ {{4}}{name}: ", explained, re.MULTILINE), name


def test_a_field_that_is_not_declared_can_neither_be_given_nor_read() -> None:
    for kind in ALL:
        with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
            kind("why", colour="red")
        with pytest.raises(AttributeError, match="colour"):
            kind("why").colour  # type: ignore[attr-defined]  # noqa: B018


def test_an_error_reads_as_its_message_alone() -> None:
    for kind in ALL:
        error = kind("the disk is full", **fields_of(kind))
        assert (str(error), repr(error)) == ("the disk is full", f"{kind.__name__}('the disk is full')")


def test_an_error_names_its_object_and_what_to_do() -> None:
    for kind in ALL:
        error = kind("the record is damaged", **fields_of(kind)).at("head in runs/a").advise("Restore it")
        assert str(error) == "head in runs/a: the record is damaged. Restore it"
        assert error.reason == "head in runs/a: the record is damaged"


def test_an_error_is_pickled_with_all_its_fields() -> None:
    for kind in ALL:
        error = kind("the disk is full", **fields_of(kind)).at("head in runs/a").advise("Make room")
        error.failed_rank = 3
        error.add_note("while saving")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))


def test_a_class_derived_from_an_error_without_its_constructor_can_look_fields_up_elsewhere() -> None:
    for kind in ALL:
        """As Ray does with the error of a remote task; a default on the class would hide the value."""
        cause = kind("why", **fields_of(kind))

        class Wrapped(kind):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                pass

            def __getattr__(self, name: str, cause: PulseError = cause) -> Any:
                return getattr(cause, name)

        wrapped = Wrapped()
        assert {name: getattr(wrapped, name) for name in vars(cause)} == vars(cause)


def test_a_checker_knows_the_type_of_a_field() -> None:
    """mypy refuses this file if one of these fields has another type, Any included."""
    assert assert_type(FormatError("why").key, str | None) is None
    assert assert_type(ChecksumError("why").section, int | None) is None
    assert assert_type(GroupError("why").failed_rank, int | None) is None
    assert assert_type(StoreError("why").retryable, bool) is False


def test_the_tree_in_the_documentation_is_the_tree_of_classes() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^    ([│├└─ ]*)(\w+Error)", errors.__doc__, re.MULTILINE)
    assert [(len(indent) // 4, name) for indent, name in drawn] == list(tree(PulseError))


def tree(kind: type[PulseError], depth: int = 0) -> Iterator[tuple[int, str]]:
    """An error and those derived from it in its module, in the order of their declaration, each with its depth."""
    yield depth, kind.__name__
    for derived in kind.__subclasses__():
        if derived in PUBLIC:
            yield from tree(derived, depth + 1)
