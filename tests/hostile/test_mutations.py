"""Versions damaged at random are refused without a trace, or were not damaged in anything that matters."""

from functools import cache
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile import forge, mutations


@cache
def victim(name: str) -> forge.Victim:
    return forge.Victim(forge.sample(name))


@pytest.mark.parametrize("name", forge.NAMES)
def test_an_undamaged_version_is_accepted(name: str) -> None:
    target = victim(name)
    assert mutations.judge(target, target.target.version.objects()) == "accepted, and right"


@pytest.mark.parametrize("name", forge.NAMES)
@settings(suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_a_damaged_version_is_refused_without_a_trace_or_is_right(name: str, rng: Random) -> None:
    target = victim(name)
    try:
        mutations.judge(target, mutations.mutate(target.target, rng))
    except mutations.MisreadError:
        target.reset()
        raise
