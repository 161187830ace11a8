"""What a rank emits of the syncs of its group."""

from typing import Any

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync import Broadcast, events
from pulsesync.errors import PulseError
from tests.group.test_broadcast import TIMEOUT_S, change_, sync, weights, zeros
from tests.processes import Fleet, fleet, group

__all__ = ["fleet"]


def emitting(rank: int, size: int, folder: str) -> Any:
    """Two syncs, and one that fails because a rank has other tensors."""
    received: list[events.Event] = []
    rng = np.random.default_rng(0)
    model = weights(rng)
    model = zeros(model) if rank else model
    with group(folder, "one", rank, size), pulse.listen(received.append):
        cast = Broadcast(timeout_s=TIMEOUT_S)
        reports = [sync(cast, rank, model)]
        if rank == 0:
            change_(model, rng, 0.01)
        reports.append(sync(cast, rank, model))
        with pytest.raises(PulseError):
            sync(cast, rank, model if rank == 0 else {"another": model["norm"]})
    return reports, received


def test_every_rank_emits_its_syncs_and_its_failures(fleet: Fleet) -> None:
    for rank, (reports, received) in enumerate(fleet.run(emitting, 3)):
        synced = [event for event in received if isinstance(event, events.GroupSynced)]
        for event, report in zip(synced, reports, strict=True):
            assert event.rank == rank
            for field in ("version", "method", "changed", "total", "full_bytes", "sent_bytes", "received_bytes"):
                assert getattr(event, field) == getattr(report, field), field
            assert (event.seconds, event.pause_s) == (report.seconds, report.apply_s)
        failed = received[2:]
        assert [type(event) for event in failed] == [events.GroupSyncFailed]
        assert isinstance(failed[0], events.GroupSyncFailed)
        assert failed[0].rank == rank
        assert "Error: " in failed[0].error
