"""Compares docs/public_names.txt, the list of the public modules and names, with the `__all__` of each module.

Modules are read and not imported, so that this needs none of the frameworks that they are for.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "docs" / "public_names.txt"
SOURCES = ("src", "lab/src")


def read_list(text: str) -> dict[str, list[str]]:
    """The names of each module, in the order of the list: a module at the beginning of a line, its names indented."""
    modules: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(" ") and not line.lstrip().startswith("#"):
            modules[list(modules)[-1]].append(line.strip())
        elif line and not line.lstrip().startswith("#"):
            modules[line.strip()] = []
    return modules


def source_of(module: str) -> Path:
    """The file of a module."""
    paths = [ROOT.joinpath(source, *module.split(".")) for source in SOURCES]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.exists()]
    if not files:
        raise FileNotFoundError(f"there is no module {module}")
    return files[0]


def names_of(module: str) -> list[str]:
    """The `__all__` of a module, which is a literal; none if it has no `__all__`."""
    for node in ast.parse(source_of(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def check(text: str | None = None) -> list[str]:
    """One line for each name that the list has and the module does not, or the other way round."""
    problems = []
    for module, listed in read_list(LIST.read_text() if text is None else text).items():
        try:
            public = names_of(module)
        except FileNotFoundError as e:
            problems.append(f"{LIST.name}: {e}")
            continue
        problems += [f"{LIST.name}: {module} has no public {name}" for name in sorted({*listed} - {*public})]
        problems += [f"{LIST.name} lacks {module}.{name}" for name in sorted({*public} - {*listed})]
        problems += [f"{LIST.name} has {module}.{name} twice" for name in sorted({*listed}) if listed.count(name) > 1]
    return problems


MODULES = list(read_list(LIST.read_text()))
