"""Checks that no class or module reads what is private to another: an attribute or a function such as `_name`.

An attribute such as `_name` belongs to the class that defines it. Its methods may read it of `self` and of other
objects of the same class: a parameter that is annotated with the class, an object that was made from it, or one that
`isinstance` was asked about. A name of a module such as `_name` belongs to that module: no other imports or reads it.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "lab/src")

# What other packages name with an underscore and document, or have no other name for: an attribute, or an expression.
NOT_OURS = {
    "_replace": "of a NamedTuple",
    "os._exit": "Python documents it: a process ends without its handlers",
    "array._getvalue": "numba: how its own intrinsics return a structure that they have changed",
    "cache._cache_file": "numba: which kernels are compiled is in the index of a cache, which has no public name",
    "cache._cache_file._load_index": "numba, the same",
    "env_runner._weights_seq_no": "RLlib: set_state of an env-runner sets it, and pulling weights replaces set_state",
    "factory._registry": "vLLM: its factory raises where an engine is registered twice, and offers no question",
    "future._done_callbacks": "concurrent.futures: add_done_callback takes a Condition, see core.threads",
    "future._state": "concurrent.futures, the same",
    "getattr(model, '_keys_to_ignore_on_save', None)": "transformers: save_pretrained reads it of each model",
    "getattr(model, '_modules', {})": "torch: named_children leaves out a module that has two names",
    "getattr(value, '_local_tensor', value)": "torch: to_local of a DTensor makes a tensor each time",
    "hasattr(threading, '_register_atexit')": "CPython: atexit runs after threads were waited for, see core.threads",
    "threading._register_atexit": "CPython, the same",
    "learners._worker_manager": "RLlib: which learners are healthy has no public name",
    "loader(config)._get_weights_iterator": "SGLang: the loader's public methods load into a model",
    "model._get_base_model_class": "PEFT: save_pretrained calls it for the configuration",
    "module._modules": "torch: a copy of a module must keep the order and the None of its tables",
    "module._parameters": "torch, the same",
    "twin._modules": "torch, the same",
    "twin._parameters": "torch, the same",
    "one._cache": "numba: the folder of a kernel's cache has no public name",
    "operations._supports_onednn": "vLLM: the only switch for plain weights on a CPU",
    "tensor._version": "torch: how often a tensor was written to",
    "torch._foreach_copy_": "torch: one launch for many copies; torch.optim uses it",
}


class _Visitor(ast.NodeVisitor):
    """Collects what a module reads of others; knows of each variable whether it is an object of the class around."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str, str]] = []  # line, name, expression
        self._classes: list[str] = []
        self._own: list[set[str]] = [set()]  # by scope: names of objects of the innermost class

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for outside in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(outside)
        self._classes.append(node.name)
        self._own.append({node.name})
        for part in node.body:
            self.visit(part)
        self._classes.pop()
        self._own.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        own = {name for name in self._own[-1] if name not in {parameter.arg for parameter in parameters}}
        if self._classes:
            own |= {p.arg for p in parameters if p.arg in ("self", "cls") or self._is_own_class(p.annotation)}
            own |= {name for part in ast.walk(node) for name in self._bound_to_own(part, own)}
        self._own.append(own)
        self.generic_visit(node)
        self._own.pop()

    visit_AsyncFunctionDef = visit_Lambda = visit_FunctionDef  # noqa: N815 - the names that ast calls

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_private(node.attr) and not self._is_own(node.value):
            self.found.append((node.lineno, node.attr, ast.unparse(node)))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(ast.Name("getattr" | "setattr" | "hasattr" | "delattr"), [of, ast.Constant(str(name)), *_]):
                if _is_private(name) and not self._is_own(of):
                    self.found.append((node.lineno, name, ast.unparse(node)))
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for name in node.names:
            if _is_private(name.name):
                self.found.append((node.lineno, name.name, f"from {node.module} import {name.name}"))

    def _is_own(self, of: ast.expr) -> bool:
        match of:
            case ast.Name(name):
                return name in self._own[-1]
            case ast.Call(ast.Name("super")):
                return True
            case ast.Call():
                return self._makes_own(of, self._own[-1])
        return False

    def _is_own_class(self, annotation: ast.expr | None) -> bool:
        if annotation is None or not self._classes:
            return False
        text = ast.unparse(annotation).strip("'\"").removesuffix(" | None").split("[")[0]
        return text in ("Self", self._classes[-1])

    def _makes_own(self, value: ast.expr | None, own: set[str]) -> bool:
        match value:
            case ast.Call(ast.Name("cls")):
                return True
            case ast.Call(ast.Name(name)) if name in self._classes[-1:]:
                return True
            case ast.Call(ast.Name("type"), [ast.Name(name)]) | ast.Call(ast.Call(ast.Name("type"), [ast.Name(name)])):
                return name in own
            case ast.Call(ast.Attribute(_, "__new__"), [ast.Name(name), *_]):
                return name in ("cls", *self._classes[-1:])
            case ast.Call(ast.Attribute(ast.Name("copy"), "copy") | ast.Name("copy"), [ast.Name(name)]):
                return name in own
        return False

    def _bound_to_own(self, part: ast.AST, own: set[str]) -> Iterator[str]:
        match part:
            case ast.Assign([ast.Name(name)], value) if self._makes_own(value, own):
                yield name
            case ast.AnnAssign(ast.Name(name), annotation) if self._is_own_class(annotation):
                yield name
            case ast.Call(ast.Name("isinstance"), [ast.Name(name), kind]) if self._is_own_class(kind):
                yield name


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


def read_of_others(source: str) -> list[tuple[int, str, str]]:
    """What a module reads that is private to another class or module: line, name, expression."""
    visitor = _Visitor()
    visitor.visit(ast.parse(source))
    return visitor.found


def check() -> list[str]:
    """One line for each expression that reads what is private to another, and for each exception that is not needed."""
    problems, needed = [], set()
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, attribute, expression in read_of_others(path.read_text(encoding="utf-8")):
            excused = {attribute, expression} & NOT_OURS.keys()
            needed |= excused
            if not excused:
                problems.append(f"{name}:{line}: {expression} is private to another class or module")
    return problems + [f"{Path(__file__).name}: nothing needs {one!r}" for one in sorted(NOT_OURS.keys() - needed)]
