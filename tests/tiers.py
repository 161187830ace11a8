"""The two tiers of tests: what `make test` runs, and what it leaves to `make test-slow`."""

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    """A case of `pytest.mark.parametrize` for the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)
