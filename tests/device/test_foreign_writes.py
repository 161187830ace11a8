"""Weights on a device that something else has written to: the next sync repairs them and blames no record."""

import logging
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pulsesync.format import patch
from tests.device.test_baseline import on
from tests.foreign_writes import TENSOR, WRITES, Arrays, sync_after
from tests.tiers import slow

IN_INTERPRETER = {"history": ["NaN"], "context": ["zeros"], "gap": ["1e-3 added"]}  # a second each; a GPU does them all


def to_host(tensor: torch.Tensor) -> Any:
    return tensor.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16).copy()


@pytest.mark.parametrize("codec", ["history", *(slow(one) for one in ("context", "gap"))])
def test_a_sync_repairs_what_something_else_has_written(
    codec: patch.CodecName, device: str, many_lanes: None, caplog: pytest.LogCaptureFixture
) -> None:
    def to_worker(arrays: Arrays) -> dict[str, torch.Tensor]:
        bits = {name: torch.from_numpy(array.view(np.int16)) for name, array in arrays.items()}
        return {name: one.view(torch.bfloat16).clone().to(device) for name, one in bits.items()}

    for name in WRITES if device == "cuda" else IN_INTERPRETER[codec]:
        with on(device), caplog.at_level(logging.WARNING, "pulsesync"):
            report, equal = sync_after(WRITES[name], codec, ml_dtypes.bfloat16, to_worker, to_host)
        assert equal, name
        assert TENSOR in report.repaired, name
    assert "Planning the sync again" not in caplog.text
