"""The layout that docs/architecture.md describes: what lies where, and that every class has a name of its own."""

import ast
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
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(ROOT)} has no docstring"
        if f"\n  {path.parent.name}/ " not in page and f"\n  {path.parent.name}/\n" not in page:
            yield f"docs/architecture.md does not describe {path.parent.name}/"
    for package in ("core", "format", "state", "device", "group", "loco", "run", "publish", "maintain"):
        for path in (PACKAGE / package).glob("*.py"):
            if path.stem != "__init__" and path.name not in page:
                yield f"docs/architecture.md does not name {path.relative_to(PACKAGE)}"


def _tests() -> Iterator[str]:
    allowed = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"chaos", "golden", "hostile", "simulator"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    yield from (f"tests/{folder} mirrors no package" for folder in folders - allowed)
