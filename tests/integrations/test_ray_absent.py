"""The Ray integration without Ray, and in a process that is in no cluster."""

import sys
from functools import partial

import pytest

from pulsesync.errors import PulseError
from pulsesync.integrations.ray import ActorTeam, Link, RayStore


def test_without_ray_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for make in (partial(RayStore, "x"), partial(Link, "x"), lambda: ActorTeam("x", 0, 2).gather(b"")):
        with pytest.raises(PulseError, match=r"ray is not installed: pip install 'pulsesync\[ray\]'"):
            make()


def test_outside_of_a_cluster_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'pulsesync[ray]': the Ray integration is NOT tested")
    monkeypatch.setenv("RAY_ADDRESS", "local")  # Ray's first call would start one
    assert not ray.is_initialized()
    with pytest.raises(PulseError, match="not connected to a Ray cluster"):
        Link("x")
    assert not ray.is_initialized()


def test_a_store_of_each_process_is_refused() -> None:
    with pytest.raises(ValueError, match="a different store in every process"):
        Link("x", at="memory://run")
