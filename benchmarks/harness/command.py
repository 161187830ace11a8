"""Find the benchmarks, and run one or all of them by name: what `python -m benchmarks` does.

A benchmark is a module of a folder next to this one with a function `main(given)`, where `given` has the values of its
options. Its docstring begins with the question that it answers, its name is that of its file, and it has:

- `QUICK`, the options that --quick stands for; those that are given in addition come after them;
- perhaps `arguments(parser)`, which adds its options.

It raises `MissingError` for what it needs and this machine does not have. A package that it imports and that is not
installed counts as such.
"""

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from benchmarks.harness.links import ROOT
from benchmarks.harness.needs import MISSING, MissingError
from benchmarks.harness.processes import command
from pulsesync.errors import PulseError

FOLDERS = ("codec", "sync", "gpu", "cluster", "engines", "loco", "lab")
OWN = ("benchmarks", "pulsesync", "pulsesync_lab", "tests")  # a module of these that does not exist is an error
LIMIT_S = 600  # of one benchmark with --quick


def find() -> dict[str, Path]:
    """Every benchmark by name, in the order of FOLDERS."""
    here = Path(__file__).parents[1]
    files = (path for folder in FOLDERS for path in sorted((here / folder).glob("*.py")))
    return {path.stem: path for path in files if "\ndef main(given: " in path.read_text()}


def docstring(path: Path) -> str:
    """The docstring of a module, without importing it."""
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def listing() -> str:
    """The benchmarks with the question that each answers, by folder."""
    out = []
    folder = ""
    for name, path in find().items():
        if path.parent.name != folder:
            folder = path.parent.name
            out.append(f"\n{folder}")
        out.append(f"  {name:15} {' '.join(docstring(path).split(chr(10) * 2)[0].split())}")
    return "\n".join(out)


def parser_of(name: str, path: Path, module: ModuleType | None) -> argparse.ArgumentParser:
    """The options of a benchmark; without its module, --help and --quick alone."""
    parser = argparse.ArgumentParser(
        f"python -m benchmarks {name}",
        description=docstring(path),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stands_for = " ".join(getattr(module, "QUICK", ()))
    parser.add_argument(
        "--quick", action="store_true", help=f"run to the end in a minute at most: {stands_for or 'as it is'}"
    )
    if module and hasattr(module, "arguments"):
        module.arguments(parser)
    return parser


def run(name: str, options: Sequence[str]) -> int:
    """Run a benchmark; return its exit code."""
    path = find()[name]
    module = None
    try:
        module = import_module(f"benchmarks.{path.parent.name}.{name}")
        quick = module.QUICK if "--quick" in options else ()
        module.main(parser_of(name, path, module).parse_args([*quick, *options]))
    except MissingError as error:
        return missing(name, str(error))
    except (ModuleNotFoundError, PulseError) as error:  # the library says so too where a package is missing
        cause = error.__cause__ if isinstance(error, PulseError) else error
        package = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
        if not package or package in OWN:
            raise
        if module is None:
            parser_of(name, path, None).parse_known_args(options)  # which answers --help
        return missing(name, f"the package {package}")
    except KeyboardInterrupt:  # its processes and links are gone by now
        return 130
    return 0


def missing(name: str, what: str) -> int:
    """Print what a benchmark needs; return its exit code."""
    print(f"{name} needs {what}", file=sys.stderr)
    return MISSING


def run_all_quickly() -> int:
    """Run every benchmark with --quick in a process of its own, one after another; return 1 if one failed, else 0."""
    failed = 0
    for name in find():
        began = time.monotonic()
        try:
            done = subprocess.run(
                command("benchmarks", name, "--quick"),
                cwd=ROOT, env=os.environ, timeout=LIMIT_S, check=False, capture_output=True, text=True,
            )  # fmt: skip
            code, printed = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            code, printed = -1, f"it was ended after {LIMIT_S} s"
        last = (printed.strip().splitlines() or [""])[-1]
        state = {0: "ok", MISSING: last.removeprefix(f"{name} ")}.get(code, f"FAILED ({code})")
        print(f"{name:15} {time.monotonic() - began:6.1f} s  {state}", flush=True)
        if code not in (0, MISSING):
            failed = 1
            print(printed[-4000:], flush=True)
    return failed


def main(arguments: Sequence[str]) -> int:
    """The command. Without arguments it lists the benchmarks."""
    name, *options = arguments or [""]
    if not name or name in ("-h", "--help"):
        print("python -m benchmarks NAME [--quick] [OPTIONS]     one of them; --help shows its options")
        print("python -m benchmarks --quick                      all of them, quickly")
        print(listing())
        return 0
    if name == "--quick" and not options:
        return run_all_quickly()
    if name not in find():
        print(f"there is no benchmark {name!r}; `python -m benchmarks` lists them", file=sys.stderr)
        return 2
    return run(name, options)
