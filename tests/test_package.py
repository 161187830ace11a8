import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import pulsesync
from tests.distributions import ROOT, pins

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")}


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(pulsesync, "subscribe")


HEAVY = {"torch", "triton", "numba", "llvmlite", "obstore", "cryptography", "ml_dtypes", "ray"}


def loaded_by(program: str) -> set[str]:
    return {name.split(".")[0] for name in run(f"import sys; {program}; print(*sys.modules)").split()}


def test_importing_needs_nothing_that_is_not_python() -> None:
    assert not (HEAVY | {"numpy", "zstandard"}) & loaded_by("import pulsesync")


def test_every_public_name_is_imported_without_what_is_heavy() -> None:
    assert not HEAVY & loaded_by("from pulsesync import *")


def test_a_run_in_a_folder_needs_no_client_of_a_store_and_no_cryptography() -> None:
    program = (
        "import tempfile, numpy as np; from pulsesync import Publisher, Subscriber; w = {'w': np.zeros(4, np.float32)};"
        "folder = tempfile.TemporaryDirectory(); pub = Publisher(folder.name); pub.publish(w); pub.close();"
        "Subscriber(folder.name).sync(w); folder.cleanup()"
    )
    assert not {"torch", "triton", "obstore", "cryptography"} & loaded_by(program)


def test_importing_takes_less_than_half_a_second() -> None:
    program = "import time; began = time.perf_counter(); import pulsesync; print(time.perf_counter() - began)"
    assert min(float(run(program)) for _ in range(3)) < 0.5


WITHOUT_NUMBA = """
import sys

class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
import tempfile
import numpy as np
from pulsesync import Publisher, Subscriber, kernels

rng = np.random.default_rng(0)
weights = {"w": rng.normal(size=(30, 40)).astype(np.float16)}
held = {"w": np.zeros((30, 40), np.float16)}
with tempfile.TemporaryDirectory() as folder:
    sub = Subscriber(folder)
    with Publisher(folder, codec="history") as pub:
        for step in range(3):
            weights["w"] += np.float16(0.001)
            pub.publish(weights, step=step)
            sub.sync(held)
    sub.verify()
assert np.array_equal(held["w"].view(np.uint16), weights["w"].view(np.uint16))
assert "numba" not in sys.modules
print(kernels.active().__name__)
"""
# What is logged there, before kernels are used and afterwards; threads may choose kernels at the same time.
LOGGED = """
import io, logging
log = io.StringIO()
logging.basicConfig(stream=log)
from concurrent.futures import ThreadPoolExecutor
"""
USED_AT_ONCE = """
kernels.active(warns=False)
assert log.getvalue() == "", log.getvalue()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(lambda _: kernels.active(), range(8)))
print(log.getvalue())
"""


def test_without_numba_everything_still_works() -> None:
    assert run(WITHOUT_NUMBA) == "pulsesync.kernels.reference"


def test_without_numba_the_first_use_of_kernels_logs_one_warning() -> None:
    hidden, imports, _ = WITHOUT_NUMBA.partition("from pulsesync import Publisher, Subscriber, kernels\n")
    (line,) = run(LOGGED + hidden + imports + USED_AT_ONCE).splitlines()
    assert line.startswith("WARNING:pulsesync.kernels:numba is not installed")
    assert "pip install numba" in line


def test_a_numba_that_cannot_be_imported_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs another NumPy')")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pulsesync import kernels;"
    assert run(program + "print(kernels.active().__name__)") == "pulsesync.kernels.reference"


NOWHERE_TO_CACHE = """
import tempfile

def refuse(*_, **__):
    raise OSError(30, "Read-only file system")

tempfile.TemporaryFile = refuse  # what numba tries before it trusts a folder
import numpy as np
from pulsesync import Publisher, kernels
with tempfile.TemporaryDirectory() as folder, Publisher(folder) as pub:
    pub.publish({"w": np.zeros(4, np.float32)})
print(kernels.active().__name__)
"""


@pytest.mark.slow  # it compiles them
def test_where_nothing_can_be_cached_kernels_are_compiled_all_the_same() -> None:
    assert run(NOWHERE_TO_CACHE) == "pulsesync.kernels.cpu"


def test_warm_up_says_how_long_it_took() -> None:
    assert pulsesync.warm_up() > 0


def test_the_list_for_a_small_machine_is_complete_and_has_the_versions_of_all_constraints() -> None:
    """pip installs it with --no-deps, so nothing would bring along what it lacks."""
    small, every = pins(ROOT / "constraints" / "edge.txt"), pins(ROOT / "constraints" / "dev.txt")
    assert small.items() <= every.items()
    needed = [Requirement(text) for name in small for text in requires(name) or ()]
    names = {one.name.lower() for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
    assert names <= set(small)
