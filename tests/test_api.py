"""The public names are those of docs/public_names.txt, and every constructor argument is described."""

import ast
import inspect
import re
from importlib import import_module
from typing import Any

import pytest

import pulsesync
from pulsesync import errors, events
from tools.docs_api import MADE_OF
from tools.lint import public_names

MODULES = list(public_names.read_list(public_names.LIST.read_text()))
# What the library returns and callers only read: its fields are described where they are declared.
RETURNED = {
    "BroadcastReport",
    "CheckedRecord",
    "CopyRecord",
    "DeltaVersion",
    "FleetStatus",
    "FolderUpdate",
    "Fused",
    "FusedPiece",
    "Listening",
    "MetricsExporter",
    "ObjectEntry",
    "Pointer",
    "PruneReport",
    "PublishReport",
    "QuantizedReport",
    "RecordedSlice",
    "Recording",
    "RoundReport",
    "SquashReport",
    "SyncReport",
    "UpdateReport",
    "WorkerStatus",
}


def test_every_error_is_public() -> None:
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and not name.startswith("_")}
    assert {name for name in classes if issubclass(getattr(errors, name), BaseException)} <= set(pulsesync.__all__)


def test_a_star_import_gives_exactly_the_public_names() -> None:
    given: dict[str, Any] = {}
    exec("from pulsesync import *", given)
    assert set(given) - {"__builtins__"} == set(pulsesync.__all__)


def test_type_checkers_see_exactly_the_public_names() -> None:
    imported = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(inspect.getsource(pulsesync)))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pulsesync"
        for alias in node.names
    }
    assert imported - {"__version__"} == set(pulsesync.__all__)


def test_dir_lists_the_public_names() -> None:
    assert set(pulsesync.__all__) <= set(dir(pulsesync))


def test_the_list_of_public_names_is_that_of_the_modules() -> None:
    assert public_names.check() == []


def test_a_name_that_is_missing_too_many_or_listed_twice_is_found() -> None:
    listed = public_names.LIST.read_text()
    changed = listed.replace("    Squasher\n", "    Squasher\n    Squasher\n    Squeezer\n").replace("    mutate\n", "")
    assert public_names.check(f"{changed}\npulsesync.nowhere\n") == [
        "public_names.txt: pulsesync.maintain.squash has no public Squeezer",
        "public_names.txt has pulsesync.maintain.squash.Squasher twice",
        "public_names.txt lacks pulsesync.testing.mutate",
        "public_names.txt: there is no module pulsesync.nowhere",
    ]


def _constructors() -> list[type]:
    """Public classes that callers construct. Errors are raised for them; protocols have nothing to construct."""
    public = (
        getattr(import_module(module), MADE_OF.get(name, name))
        for module in MODULES
        for name in import_module(module).__all__
    )
    return [
        value
        for value in dict.fromkeys(one for one in public if inspect.isclass(one))
        if not issubclass(value, BaseException)
        and not getattr(value, "_is_protocol", False)
        and value.__name__ not in RETURNED
        and not issubclass(value, events.Event)
    ]


@pytest.mark.parametrize("cls", _constructors(), ids=lambda cls: cls.__name__)
def test_every_argument_of_a_public_constructor_is_described(cls: type) -> None:
    parameters = [name for name in inspect.signature(cls).parameters if not name.startswith("_")]
    docs = "\n".join(inspect.cleandoc(doc) for doc in (cls.__doc__, cls.__init__.__doc__) if doc)  # type: ignore[misc]
    sections = re.findall(r"^Args:\n((?:    .*\n?|\n)+)", docs, re.MULTILINE)
    described = re.findall(r"^    \*{0,2}(\w+): \S", "\n".join(sections), re.MULTILINE)
    assert described == parameters


def test_constructors_are_found() -> None:
    assert {"Publisher", "Subscriber", "PulseLoCo", "RayStore", "HttpStore", "PublishingCallback"} <= {
        cls.__name__ for cls in _constructors()
    }
