"""These tests run with the real verl, in an environment of their own: make test-verl. Elsewhere all are skipped."""

import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

IS_THERE = find_spec("verl") is not None
if IS_THERE:
    with warnings.catch_warnings():  # of verl, about Ray, torch and what it does not find, as it is imported
        warnings.simplefilter("ignore")
        for name in ("engine_workers", "engine.fsdp", "rollout.sglang_rollout.utils"):
            import_module(f"verl.workers.{name}")


class UntestedModule(pytest.Module):
    """A module of tests that cannot be imported without verl."""

    def collect(self) -> NoReturn:
        pytest.skip("verl is not installed: its adapter is UNTESTED here; run make test-verl", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Called for each test module of this folder."""
    return None if IS_THERE else UntestedModule.from_parent(parent, path=module_path)
