"""A worker whose weights something else has written to: the next sync repairs and names them, and blames no record."""

import logging

import pytest

from pulsesync.format import patch
from tests.foreign_writes import CODECS, DTYPES, TENSOR, WRITES, sync_after


@pytest.mark.usefixtures("a_tile_for_each_tensor")
@pytest.mark.parametrize("codec", CODECS)
def test_a_sync_repairs_what_something_else_has_written(
    codec: patch.CodecName, caplog: pytest.LogCaptureFixture
) -> None:
    for dtype in DTYPES:
        for name, write in WRITES.items():
            with caplog.at_level(logging.WARNING, "pulsesync"):
                report, equal = sync_after(write, codec, dtype)
            assert equal, (name, dtype)
            assert report.repaired == (TENSOR,), (name, dtype)
    assert "Planning the sync again" not in caplog.text
