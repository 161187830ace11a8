"""How long does a process wait for pulsesync: to import it, and to compile or load its kernels?

    python -m benchmarks start

Each number is the median of three fresh processes. Time is measured inside them, so the start of the interpreter is not
included. `import numba` is listed for comparison, because the kernels require it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from benchmarks.harness.report import Rounds, json_line, provenance, table

QUICK = ("--rounds", "1")

CHILD = """
import json, sys, time
began = time.perf_counter()
import {module}
imported = time.perf_counter()
if {warm}:
    {module}.warm_up()
print(json.dumps([imported - began, time.perf_counter() - imported]))
"""


def fresh(module: str, warm: bool, cache: str) -> list[float]:
    """Seconds to import a module, and to warm up, in a new process that keeps compiled kernels in this folder."""
    code = CHILD.format(module=module, warm=warm)
    environment = {**os.environ, "NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)


def main(given: argparse.Namespace) -> None:
    names = ["import numba", "import pulsesync", "warm_up, nothing cached", "warm_up, later process"]
    numba, imported, first, later = found = [Rounds(name) for name in names]
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as cache:
            numba.add("s", fresh("numba", False, cache)[0])
            imported.add("s", fresh("pulsesync", False, cache)[0])
            first.add("s", fresh("pulsesync", True, cache)[1])
            later.add("s", fresh("pulsesync", True, cache)[1])
    print(f"Seconds, medians of {given.rounds} fresh processes (20th–80th percentile).\n")
    print(table(["", "s"], [[one.name, one.shown("s")] for one in found]) + "\n")
    seconds = {one.name: one.spread("s") for one in found}
    print(json_line({"bench": "start", **provenance(), "rounds": given.rounds, "seconds": seconds}))
