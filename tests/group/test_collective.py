"""Real gloo processes in which one dies: every other rank gets its error at once, whatever it was waiting for."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pulsesync.errors import GroupError
from pulsesync.group.collective import Collective
from tests.processes import GROUP_TIMEOUT_S, Fleet, die, fleet, join_group

__all__ = ["fleet"]

FOUND_S = GROUP_TIMEOUT_S / 2  # measured: 0.02 to 0.1 s


def bereaved(rank: int, size: int, folder: str, victim: int, call: str, devices: int) -> float:
    """One rank dies before its fifth message; return how long this one waited in the call that raised."""
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join(["lo"] * devices)
    join_group(folder, "group", rank, size)
    team, began = Collective(timeout_s=GROUP_TIMEOUT_S), 0.0
    messages: dict[str, Callable[[], object]] = {
        "gather": lambda: team.gather_rows(np.zeros(8, np.uint8)),
        "broadcast": lambda: team.broadcast_(np.zeros(1 << 16, np.uint8), 0),
        "swap": lambda: team.swap([bytes(1 << 16)] * size, 1 << 16),
    }
    with pytest.raises(GroupError, match="lost the others"):  # noqa: PT012 - which of the calls raises is up to gloo
        for number in range(50):
            if rank == victim and number == 4:
                die()
            began = time.monotonic()
            messages[call]()
    waited = time.monotonic() - began
    (Path(folder) / f"found-{rank}").touch()
    while len(list(Path(folder).glob("found-*"))) < size - 1:  # the end of this process must not be what others notice
        time.sleep(0.005)
    return waited


@pytest.mark.parametrize(
    ("call", "victim", "devices"),
    [("gather", 0, 1), ("gather", 2, 1), ("broadcast", 0, 1), ("broadcast", 2, 1), ("swap", 1, 1), ("gather", 3, 2)],
)
def test_when_a_rank_dies_every_other_rank_gets_an_error_long_before_the_timeout(
    fleet: Fleet, call: str, victim: int, devices: int
) -> None:
    waited = fleet.run(bereaved, 5, killed=[victim], victim=victim, call=call, devices=devices)
    assert [rank for rank, seconds in enumerate(waited) if rank != victim and not seconds < FOUND_S] == []


def outgrown(rank: int, size: int, folder: str) -> str:
    """Rank 1 sends rank 0 more than was agreed on; return what each rank raises."""
    join_group(folder, "group", rank, size)
    team = Collective(timeout_s=GROUP_TIMEOUT_S)
    with pytest.raises(GroupError) as caught:
        team.swap([bytes(9 if rank else 8)] * size, 8)
    return str(caught.value)


def test_a_message_longer_than_allowed_is_refused_with_its_rank_and_length(fleet: Fleet) -> None:
    refused, lost = fleet.run(outgrown, 2)
    assert "rank 1 reports 9 bytes, and 0 to 8 are allowed" in refused
    assert "lost the others" in lost
