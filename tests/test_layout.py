"""The layout that docs/architecture.md describes: what lies where, and that every class has a name of its own."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "pulsesync"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_the_package_root_holds_packages_and_errors() -> None:
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == ["__init__.py", "errors.py"]


def test_every_class_has_a_name_of_its_own() -> None:
    found = defaultdict(list)
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name.lstrip("_")].append(str(path.relative_to(PACKAGE)))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_every_package_is_described_by_its_docstring_and_on_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in PACKAGE.glob("*/__init__.py"):
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
        assert f"\n  {path.parent.name}/ " in page or f"\n  {path.parent.name}/\n" in page, path.parent.name


def test_every_module_is_on_the_page() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    packages = ("core", "format", "state", "device", "group", "loco", "run", "publish", "maintain")
    named = [path for package in packages for path in (PACKAGE / package).glob("*.py") if path.stem != "__init__"]
    assert [str(path.relative_to(PACKAGE)) for path in named if f"{path.stem}.py" not in page] == []


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    allowed = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} | {"chaos", "golden", "hostile", "simulator"}
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert folders <= allowed
