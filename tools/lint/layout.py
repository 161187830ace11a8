"""The layout that docs/architecture.md describes: what lies where, and that every class has a name of its own."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pulsesync"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def check() -> list[str]:
    """What is not as the page describes it, a line each."""
    return [*_names(), *_described(), *_tests()]


def _names() -> Iterator[str]:
    root = sorted(path.name for path in PACKAGE.glob("*.py"))
    if root != ["__init__.py", "errors.py"]:
        yield f"src/pulsesync has the modules {root}; it holds packages, and errors.py alone"
    found = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    yield from (f"{' and '.join(where)} have a class {name} each" for name, where in found.items() if len(where) > 1)


def _described() -> Iterator[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in PACKAGE.glob("*/__init__.py"):
        if not re.search(rf"^[a-z |]*\b{path.parent.name}\b[a-z |]*  ", page, re.MULTILINE):
            yield f"docs/architecture.md does not describe {path.parent.name}/"
    for path in modules():
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(ROOT)} does not say in a docstring what it is for"


def _tests() -> Iterator[str]:
    allowed = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"chaos", "golden", "hostile", "simulator"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    yield from (f"tests/{folder} mirrors no package" for folder in folders - allowed)
