"""The public names: pinned here, documented in docs/api.md, and every constructor argument described."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pulsesync
from pulsesync import errors, events

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MODULES = [
    "pulsesync",
    "pulsesync.core.events",
    "pulsesync.store",
    "pulsesync.quantized",
    "pulsesync.loco",
    "pulsesync.maintain.squash",
    "pulsesync.maintain.prune",
    "pulsesync.maintain.verify",
    "pulsesync.metrics",
    "pulsesync.server",
    "pulsesync.integrations.folder",
    "pulsesync.integrations.delta_folder",
    "pulsesync.integrations.frameworks",
    "pulsesync.integrations.huggingface",
    "pulsesync.integrations.jax",
    "pulsesync.integrations.keras",
    "pulsesync.integrations.peft",
    "pulsesync.integrations.pretrained",
    "pulsesync.integrations.runtime",
    "pulsesync.integrations.sglang",
    "pulsesync.integrations.vllm",
    "pulsesync.integrations.ray",
    "pulsesync_lab.study",
    "pulsesync.testing",
]
# Made at their first use, which needs transformers or Keras, from a class that has all of their code.
MADE_OF = {"PulseCallback": "PublishingCallback", "KerasCallback": "KerasPublishing"}
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


def test_the_public_names_are_these() -> None:
    assert pulsesync.__all__ == [
        "AnotherPublisherError",
        "BaseMismatchError",
        "Broadcast",
        "BroadcastReport",
        "ChainError",
        "ChecksumError",
        "ClosedError",
        "Collective",
        "ConflictError",
        "Delegation",
        "FleetStatus",
        "FormatError",
        "GroupError",
        "LimitError",
        "MissingBucketError",
        "MissingLinkError",
        "NotFoundError",
        "NothingPublishedError",
        "Placed",
        "Pointer",
        "PointerMovedError",
        "PublishReport",
        "Publisher",
        "PulseError",
        "RoundError",
        "RunChangedError",
        "RunForkedError",
        "RunReplacedError",
        "RunRolledBackError",
        "ShardedPublisher",
        "SignatureError",
        "SigningKey",
        "Slice",
        "StaleWeightsError",
        "StateError",
        "StoreError",
        "Subscriber",
        "SyncReport",
        "UnsupportedError",
        "VerificationError",
        "WorkerStatus",
        "events",
        "listen",
        "loco",
        "move_pointer",
        "open_store",
        "read_fleet",
        "read_pointers",
        "show_progress",
        "tensor_parallel",
        "warm_up",
    ]


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


def test_the_page_lists_the_public_modules() -> None:
    assert re.findall(r"^## `(.+)`$", PAGE.read_text(), re.MULTILINE) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_the_page_lists_every_public_name_of_a_module_and_no_other(module: str) -> None:
    section = PAGE.read_text().split(f"\n## `{module}`\n")[1].split("\n## ")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \| [^|]+ \|$", section, re.MULTILINE)) == sorted(
        import_module(module).__all__
    )


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
