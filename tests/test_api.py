"""What `import pulsesync` gives: exactly the public names, by every way to ask for them."""

import ast
import inspect
from typing import Any

import pulsesync
from pulsesync import errors


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
