"""Makes the page of all public names, from docs/public_names.txt and the docstrings: a line of each on what it is.

`make docs` puts it into the site as api.md. Modules are read and not imported.
"""

import ast
import re
from functools import cache

from tools.lint.public_names import LIST, source_of

INTRODUCTION = """# Public names

These names are public. Everything else in the package is internal: it may change in any version, also where another
page or a benchmark imports it. [Versions](versioning.md#the-package) says what is promised for them.

`import pulsesync` needs neither numpy nor torch; each name is imported at its first use. This page is generated from
the docstrings."""
SHORT = 240  # characters
# Made at their first use from a class that has all of their code and their description.
MADE_OF = {"PulseCallback": "PublishingCallback", "KerasCallback": "KerasPublishing"}
SUBMODULES = {"events": "pulsesync.core.events", "loco": "pulsesync.loco"}  # public names that are modules


def reference() -> str:
    """Return the text of the page."""
    lines, module, in_table = [INTRODUCTION], "", False
    for line in LIST.read_text().splitlines():
        name = line.strip()
        if not name or line.startswith("#"):
            continue
        if not line.startswith(" "):
            lines += ["", f"## `{name}`", "", f"{summary(name)} [Signatures and arguments](api/{name}.md)."]
            module, in_table = name, False
        elif name.startswith("#"):
            lines += ["", f"{name.lstrip('# ')}:"]
            in_table = False
        else:
            lines += [] if in_table else ["", "| name | what it is |", "|---|---|"]
            lines.append(f"| `{name}` | {summary(module, name)} |")
            in_table = True
    return "\n".join([*lines, ""])


def summary(module: str, name: str | None = None) -> str:
    """The first paragraph of the docstring of a module, or of a name of it; of a long one, its first sentence.

    Raises:
        LookupError: it has no docstring.
    """
    if module == "pulsesync" and name in SUBMODULES:
        module, name = SUBMODULES[name], None
    text = ast.get_docstring(_tree(module)) if name is None else _docstring(module, MADE_OF.get(name, name))
    if not text:
        raise LookupError(f"{module}.{name} has no docstring" if name else f"{module} has no docstring")
    paragraph = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
    return paragraph if len(paragraph) <= SHORT else re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0].rstrip(":")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text())


def _docstring(module: str, name: str) -> str | None:
    """The docstring of a class, function or constant, where it is defined."""
    body = _tree(module).body
    for at, node in enumerate(body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return ast.get_docstring(node)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == name:
                match body[at + 1 : at + 2]:
                    case [ast.Expr(ast.Constant(str() as text))]:
                        return text
                return None
    for found in ast.walk(_tree(module)):
        if isinstance(found, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in found.names):
            return _docstring(found.module or "", name)
    return None
