"""Blocks of an anchor that were decoded and checked, on disk until the last part of it was."""

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pulsesync.core.types import Bits, Sum
from pulsesync.errors import StoreError
from pulsesync.format.patch import WholeBlock


class StagedBlocks:
    """Decoded blocks in a file that has no name: no other process can open it, and it is gone when this one ends.

    So the blocks are not hashed and decoded again when they are read. Their digests are kept here: what a disk returns
    is counted, as every weight is that is written.

    Args:
        folder: Where the file takes its room; None: in the system's temporary folder.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.blocks: list[WholeBlock] = []
        self.sums: list[Sum] = []
        self._folder = folder or Path(tempfile.gettempdir())
        self._end = 0
        self._lock = threading.Lock()
        with self._translated():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 - closed by `close`

    def add(self, block: WholeBlock, bits: Bits, total: Sum) -> None:
        """Put a block, of which these are the weights and their digest, into the file. Any thread may call this.

        Raises:
            StoreError: the disk is full, or failed.
        """
        data = np.ascontiguousarray(bits).view(np.uint8)
        with self._lock:
            begin, self._end = self._end, self._end + data.size
        with self._translated():
            written = 0
            while written < data.size:
                written += os.pwrite(self._file.fileno(), data[written:].data, begin + written)
        with self._lock:
            self.blocks.append(WholeBlock(block.tile, block.number, lambda out: self._read(out, begin)))
            self.sums.append(total)

    def _read(self, out: Bits, begin: int) -> None:
        """Read the weights of a block into contiguous memory."""
        data = out.view(np.uint8)
        with self._translated():
            read = 0
            while read < data.size:
                some = os.preadv(self._file.fileno(), [data[read:].data], begin + read)
                if not some:
                    raise StoreError(f"a file in {self._folder} ends before the anchor that was written to it")
                read += some

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises: StoreError, for what the disk raises."""
        try:
            yield
        except OSError as e:
            raise StoreError(f"cannot spool an anchor in {self._folder}: {e.strerror}", key=str(self._folder)) from e

    def close(self) -> None:
        """Give the room on disk back. The blocks cannot be read any more."""
        self._file.close()

    def __enter__(self) -> "StagedBlocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
