"""Every argument of a public constructor is described in an Args section, in the order of the signature.

An error is raised with no fact that its class does not declare: the constructor checks it, and runs too late for that.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import get_type_hints

import pulsesync.errors
from pulsesync import events
from tools.docs_api import MADE_OF
from tools.lint.layout import modules
from tools.lint.public_names import MODULES

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


def check() -> list[str]:
    """The constructors whose arguments are not described, and the errors with unknown facts, a line each."""
    return [*_undescribed(), *_unknown_facts()]


def _unknown_facts() -> Iterator[str]:
    errors = {name: kind for name, kind in vars(pulsesync.errors).items() if inspect.isclass(kind)}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors:
                declared = get_type_hints(errors[node.func.id])
                for fact in (keyword.arg for keyword in node.keywords):
                    if fact is not None and fact not in declared:
                        yield f"{path.name}:{node.lineno}: {node.func.id} does not declare the fact {fact!r}"


def _undescribed() -> Iterator[str]:
    for cls in _constructors():
        parameters = [name for name in inspect.signature(cls).parameters if not name.startswith("_")]
        docs = "\n".join(inspect.cleandoc(doc) for doc in (cls.__doc__, cls.__init__.__doc__) if doc)  # type: ignore[misc]
        sections = re.findall(r"^Args:\n((?:    .*\n?|\n)+)", docs, re.MULTILINE)
        described = re.findall(r"^    \*{0,2}(\w+): \S", "\n".join(sections), re.MULTILINE)
        if described != parameters:
            yield f"{cls.__module__}.{cls.__name__} takes {parameters}, and describes {described}"
