"""A receiver whose weights something else has written to: one push may fail and names it, and the next repairs it."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pulsesync.errors import GroupError, PulseError, VerificationError
from pulsesync.group.broadcast import Broadcast
from tests.foreign_writes import TENSOR, WRITES, train, weights
from tests.processes import Fleet, fleet, group
from tests.tiers import slow

__all__ = ["fleet"]


def written(rank: int, size: int, folder: str, method: Any) -> list[tuple[str, list[str], bytes]]:
    """Push, write to the weights of rank 1, and push until nobody fails; what each write led to."""
    out, rng = [], np.random.default_rng(2)
    arrays = weights(ml_dtypes.bfloat16)
    model = {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in arrays.items()}
    with group(folder, "one", rank, size):
        cast = Broadcast(timeout_s=20.0, method=method)
        for name, write in WRITES.items():
            (cast.pull_ if rank else cast.push)(model)
            if rank == 1:
                write(arrays[TENSOR])
            errors = []
            for _ in range(3):
                if rank == 0:
                    train(arrays, rng)
                try:
                    (cast.pull_ if rank else cast.push)(model)
                except PulseError as e:
                    errors.append(f"{type(e).__name__}: {e}")
            out.append((name, errors, b"".join(array.tobytes() for array in arrays.values())))
    return out


@pytest.mark.parametrize("method", ["coded", *(slow(m) for m in ("dense", "gap", "plain"))])
def test_a_receiver_that_something_else_has_written_to_keeps_nobody_waiting(fleet: Fleet, method: str) -> None:
    source, damaged, other = fleet.run(written, 3, method=method)
    for (name, at_source, sent), (_, at_damaged, received), (_, at_other, also) in zip(
        source, damaged, other, strict=True
    ):
        assert received == sent == also, name
        assert len(at_damaged) == len(at_source) == len(at_other) <= 1, (name, at_damaged)
        for error in at_damaged:
            assert error.startswith(VerificationError.__name__), (name, error)
            assert "something else wrote them" in error, (name, error)
        for error in at_source + at_other:
            assert error.startswith(f"{GroupError.__name__}: rank 1 failed in this sync"), (name, error)
