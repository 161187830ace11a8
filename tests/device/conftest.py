"""Without torch or Triton the tests here are skipped, and say so: their modules are not even imported."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from pulsesync.kernels import spec
from tests.device import interpreter

HOW = {"torch": "make test, or pip install torch", "triton": "make test, or pip install 'triton==3.7.*' (Linux only)"}


def _missing() -> str:
    for name, how in HOW.items():
        try:
            import_module(name)
        except ImportError as error:
            return f"the GPU path is NOT tested: {name} cannot be imported ({error}); to install it: {how}"
    return ""


MISSING = _missing()
if not MISSING:
    interpreter.mend()


class Untested(pytest.Module):
    """A module of tests that cannot be imported here."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return Untested.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture
def many_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane for every two decisions, at both ends, where the format asks for 4,096: 32 of them in small blocks.

    It is also what makes these tests quick: the interpreter takes as long for a round of one lane as of 32.
    """
    monkeypatch.setattr(spec, "LANE_DECISIONS", 2)
