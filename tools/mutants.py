"""Do the tests notice a change of the code? Plants small faults, one at a time, and runs the tests that reach each.

    python -m tools.mutants sample --count 200 --seed 0 > faults.jsonl    # in run, state, publish and format
    python -m tools.mutants run faults.jsonl > results.jsonl              # noticed or not, and by which test

A fault is one swapped comparison, operator or condition, a constant that is one larger, a statement left out, or a
`raise` that does not happen. The tests of the package of each fault are run first with coverage, to learn which of them
reach its line; only these can notice it. The suite needs pytest-cov (it is in the group `dev`).
"""

import argparse
import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = ("run", "state", "publish", "format")
LIMIT_S = 300  # for one mutant; a test that never ends has noticed it
COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.LShift: ast.RShift,
}  # fmt: skip


def faults_of(source: str) -> Iterator[tuple[int, int, str]]:
    """Every place for a fault in a file: line, column, and the kind of fault."""
    tree = ast.parse(source)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in (inner for statement in function.body for inner in ast.walk(statement)):
            if isinstance(node, ast.FunctionDef):
                continue  # it has a turn of its own
            kind = _kind(node)
            if kind:
                yield node.lineno, node.col_offset, kind  # type: ignore[attr-defined]


def _kind(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARE:
            return "comparison"
        case ast.BoolOp():
            return "and/or"
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            return "arithmetic"
        case ast.If() | ast.While():
            return "condition"
        case ast.Constant(value=value) if type(value) is int:
            return "constant"
        case ast.Raise():
            return "raise"
        case ast.Expr(value=ast.Call()):
            return "call left out"
        case ast.AugAssign():
            return "assignment left out"
    return None


class Planter(ast.NodeTransformer):
    """Plants the one fault at a place."""

    def __init__(self, line: int, column: int, kind: str) -> None:
        self.place, self.kind, self.planted = (line, column), kind, False

    def generic_visit(self, node: ast.AST) -> Any:
        """Change the node if it is the one."""
        here = (getattr(node, "lineno", None), getattr(node, "col_offset", None))
        if not self.planted and here == self.place and _kind(node) == self.kind:
            self.planted = True
            return ast.copy_location(_changed(node), node)
        return super().generic_visit(node)


def _changed(node: ast.AST) -> ast.AST:
    match node:
        case ast.Compare(ops=[op]):
            node.ops = [COMPARE[type(op)]()]
        case ast.BoolOp():
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.BinOp(op=operator):
            node.op = ARITHMETIC[type(operator)]()
        case ast.If() | ast.While():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Constant(value=int(value)):
            return ast.Constant(value + 1)
        case _:
            return ast.Pass()
    return node


def plant(source: str, line: int, column: int, kind: str) -> str:
    """Return the source with one fault."""
    planter = Planter(line, column, kind)
    tree = planter.visit(ast.parse(source))
    assert planter.planted, f"there is no {kind} at {line}:{column}"
    return ast.unparse(ast.fix_missing_locations(tree))


def sample(count: int, seed: int) -> None:
    """Print a sample of faults, as many from each package as its share of all."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / "src" / "pulsesync" / package).rglob("*.py")):
            file, lines = str(path.relative_to(ROOT)), path.read_text().splitlines()
            found += [
                {"package": package, "file": file, "line": line, "column": column, "kind": kind, "is": lines[line - 1]}
                for line, column, kind in sorted(set(faults_of(path.read_text())))
            ]
    for fault in sorted(random.Random(seed).sample(found, count), key=lambda one: (one["file"], one["line"])):
        print(json.dumps(fault))


def tests_by_line(package: str, folder: Path, options: list[str]) -> dict[tuple[str, int], list[str]]:
    """Run the tests of a package; return the tests that reach each line."""
    data, report = folder / f"{package}.coverage", folder / f"{package}.xml"
    env = {**os.environ, "COVERAGE_FILE": str(data), "PYTHONPATH": _path(ROOT / "src")}
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *options]
    cov = [
        f"--cov=pulsesync.{package}",
        f"--cov-config={os.devnull}",  # lines and not branches, and nothing left out
        "--cov-context=test",
        "--cov-report=",
        "--timeout=0",
        "-o",
        "faulthandler_timeout=0",
    ]
    subprocess.run([*program, *cov, f"tests/{package}"], cwd=ROOT, env=env, stdout=sys.stderr, check=False)
    connection = sqlite3.connect(data)
    rows = connection.execute(
        "select file.path, context.context, line_bits.numbits from line_bits"
        " join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id"
    )
    found: dict[tuple[str, int], dict[str, None]] = {}
    for path, context, bits in rows:
        test = context.rpartition("|")[0]
        for number in (8 * i + bit for i, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1):
            if test:
                found.setdefault((str(Path(path).relative_to(ROOT)), number), {})[test] = None
    return {line: list(tests) for line, tests in found.items()}


def _path(source: Path) -> str:
    return os.pathsep.join([str(source), str(ROOT / "lab" / "src"), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)


def run(faults: list[dict[str, Any]], options: list[str]) -> None:
    """Plant each fault in a copy of the source, and print it with the test that noticed it, or none."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(ROOT / "src", folder / "src", copy_function=shutil.copy2)  # with compiled kernels
        reached = {package: tests_by_line(package, folder, options) for package in {one["package"] for one in faults}}
        for fault in faults:
            path = folder / fault["file"]
            good = path.read_text()
            try:
                path.write_text(plant(good, fault["line"], fault["column"], fault["kind"]))
                tests = reached[fault["package"]].get((fault["file"], fault["line"]), [])
                began = time.monotonic()
                noticed = _noticed(tests, folder / "src", options) if tests else None
            finally:
                path.write_text(good)
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({**fault, "tests": len(tests), "noticed_by": noticed, "seconds": seconds}), flush=True)


def _noticed(tests: list[str], source: Path, options: list[str]) -> str | None:
    """The first test that fails with the faulty source, or None."""
    env = {**os.environ, "PYTHONPATH": _path(source), "PYTHONDONTWRITEBYTECODE": "1"}
    program = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rfE", "--no-header", "--tb=no"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
        chosen.write("\n".join(tests))
        chosen.flush()
        try:
            done = subprocess.run(
                [*program, *options, f"@{chosen.name}"],
                cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end in {LIMIT_S} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return None if done.returncode == 0 else failed[0] if failed else f"exit code {done.returncode}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser("python -m tools.mutants", None, __doc__)
    parser.formatter_class = argparse.RawTextHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = commands.add_parser("sample")
    chosen.add_argument("--count", type=int, default=200)
    chosen.add_argument("--seed", type=int, default=0)
    planted = commands.add_parser("run")
    planted.add_argument("mutants", type=Path)
    planted.add_argument("--slow", action="store_true", help="the tests of make test-slow, too")
    given = parser.parse_args()
    if given.command == "sample":
        sample(given.count, given.seed)
    else:
        marks = [] if given.slow else ["-m", "not slow"]
        options = ["--hypothesis-profile=quick", "-p", "no:randomly", *marks]
        run([json.loads(line) for line in given.mutants.read_text().splitlines()], options)


if __name__ == "__main__":
    main()
