"""Every planted fault is found by the simulator, and every invariant has one that violates it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.simulator import Invariant
from tests.simulator.faults import FAULTS, PlantedFault, replacing


@pytest.mark.parametrize(
    "fault",  # every fifth in `make test`
    [pytest.param(fault, id=str(fault), marks=[pytest.mark.slow] if n % 5 else []) for n, fault in enumerate(FAULTS)],
)
def test_a_planted_fault_violates_its_invariant(fault: PlantedFault) -> None:
    """In the schedule that is known to find it or, where the library has changed since, in another one."""
    found_by = fault.found_by if fault.is_found_by(*fault.found_by) else fault.find()
    assert found_by is not None, f"{fault.violates.name} holds in all schedules with {fault}"
    fault.schedule(*found_by).run()  # without the fault, the same schedule is a good one


def test_every_invariant_is_violated_by_a_planted_fault() -> None:
    assert {fault.violates for fault in FAULTS} == set(Invariant)


class Library:
    def put(self, part: bytes) -> int:
        return len(part)


@pytest.mark.parametrize(
    ("name", "mistake", "complaint"),
    [
        ("create", lambda self, part: 0, "Library.create, which does not exist"),
        ("put", lambda self: 0, r"has the parameters \['self .*\], and Library.put has"),
        ("put", lambda self, part=None: 0, "part=None"),
        ("put", lambda self, *, part: 0, "keyword-only"),
    ],
)
def test_a_fault_older_than_the_code_is_not_planted(
    name: str, mistake: Callable[..., Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Library.put
    with pytest.raises(AssertionError, match=complaint):
        replacing(Library, name, mistake, Invariant.PUBLISH_REPORT, 0, 1).plant(monkeypatch)
    assert Library.put is put
