"""Real gloo processes: buffers of all kinds arrive; and where one dies, every other rank gets its error at once."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.errors import GroupError
from pulsesync.group.collective import Collective, HelperThread
from tests.processes import GROUP_TIMEOUT_S, Fleet, die, fleet, join_group

__all__ = ["fleet"]

FOUND_S = GROUP_TIMEOUT_S / 2  # measured: 0.02 to 0.1 s


def send_and_gather(team: Collective) -> None:
    team.send_(np.zeros(1 << 16, np.uint8), 0, range(1, team.size))
    team.gather_rows(np.zeros(8, np.uint8))


def bereaved(rank: int, size: int, folder: str, victim: int, call: str, devices: int) -> float:
    """One rank dies before its fifth message; return how long this one waited in the call that raised."""
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join(["lo"] * devices)
    join_group(folder, "group", rank, size)
    team, began = Collective(timeout_s=GROUP_TIMEOUT_S), 0.0
    messages: dict[str, Callable[[], object]] = {
        "gather": lambda: team.gather_rows(np.zeros(8, np.uint8)),
        "broadcast": lambda: team.broadcast_(np.zeros(1 << 16, np.uint8), 0),
        "tensor": lambda: team.broadcast_(torch.zeros(1 << 16, dtype=torch.uint8), 0),
        "swap": lambda: team.swap([bytes(1 << 16)] * size, 1 << 16),
        "send": partial(send_and_gather, team),
    }
    with pytest.raises(GroupError, match="lost the other ranks"):  # noqa: PT012 - which of the calls raises is up to gloo
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
    [
        ("gather", 0, 1),
        ("gather", 2, 1),
        ("broadcast", 0, 1),
        ("broadcast", 2, 1),
        ("tensor", 2, 1),
        ("swap", 1, 1),
        ("send", 1, 1),
        ("gather", 3, 2),
    ],
)
def test_when_a_rank_dies_every_other_rank_gets_an_error_long_before_the_timeout(
    fleet: Fleet, call: str, victim: int, devices: int
) -> None:
    waited = fleet.run(bereaved, 5, killed=[victim], victim=victim, call=call, devices=devices)
    assert [rank for rank, seconds in enumerate(waited) if rank != victim and not seconds < FOUND_S] == []


def buffers(rank: int, size: int, folder: str) -> dict[str, tuple[int, int, int]]:
    """Every rank sends from, and receives into, arrays and tensors; return what each call counted."""
    join_group(folder, "group", rank, size)
    team, counted = Collective(timeout_s=GROUP_TIMEOUT_S), {}
    assert team.device == torch.device("cpu")
    calls: dict[str, Callable[[Any, int], object]] = {
        "broadcast": team.broadcast_,
        "send": lambda buffer, source: team.send_(buffer, source, [r for r in range(size) if r not in (source, 2)]),
    }
    for name, call in calls.items():
        before = team.messages, team.sent_bytes, team.received_bytes
        for source in (0, 1):
            for source_has_array, target_has_array in itertools.product((True, False), repeat=2):
                array = np.full(1000, 10 + source if rank == source else 99, np.uint8)
                has_array = source_has_array if rank == source else target_has_array
                call(array if has_array else torch.from_numpy(array), source)
                left_out = name == "send" and rank == 2
                assert (array == (99 if left_out else 10 + source)).all()
        after = team.messages, team.sent_bytes, team.received_bytes
        counted[name] = (after[0] - before[0], after[1] - before[1], after[2] - before[2])
    return counted


def test_arrays_and_tensors_are_sent_and_received_and_counted(fleet: Fleet) -> None:
    """Of 8 messages, ranks 0 and 1 send 4 and receive 4; rank 2 is left out where messages go to some ranks alone."""
    pair, third = (
        {"broadcast": (8, 4000, 4000), "send": (8, 4000, 4000)},
        {"broadcast": (8, 0, 8000), "send": (0, 0, 0)},
    )
    assert fleet.run(buffers, 3) == [pair, pair, third]


def refused(rank: int, size: int, folder: str) -> list[str]:
    """Buffers that are none are refused before anything is sent, and the group still works; return the errors."""
    join_group(folder, "group", rank, size)
    team, said = Collective(timeout_s=GROUP_TIMEOUT_S), []
    for buffer in (torch.zeros(4), torch.zeros((2, 2), dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)[::2]):
        for call in (team.broadcast_, lambda buffer, source: team.send_(buffer, source, [1 - source])):
            with pytest.raises(ValueError, match="must be one-dimensional, contiguous and of bytes") as caught:
                call(buffer, 0)
        said.append(str(caught.value))
    assert team.gather(b"%d" % rank) == [b"0", b"1"]
    return said


def test_a_buffer_that_has_no_plain_bytes_is_refused_and_the_group_stays_in_step(fleet: Fleet) -> None:
    for float_, matrix, strided in fleet.run(refused, 2):
        assert "got torch.float32 of shape (4,)" in float_
        assert "got torch.uint8 of shape (2, 2)" in matrix
        assert "got torch.uint8 of shape (2,), not contiguous" in strided


def test_a_helper_thread_returns_raises_gives_up_and_ends_with_its_owner() -> None:
    helper, released = HelperThread(), threading.Event()
    (thread,) = [t for t in threading.enumerate() if t.name == "pulsesync-helper"]
    assert helper.call(threading.get_ident, 5) == thread.ident
    with pytest.raises(ZeroDivisionError):
        helper.call(lambda: 1 // 0, 5)
    with pytest.raises(TimeoutError):
        helper.call(released.wait, 0.05)
    released.set()
    assert helper.call(lambda: 7, 5) == 7
    del helper
    thread.join(5)
    assert not thread.is_alive()


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
    assert "lost the other ranks" in lost
