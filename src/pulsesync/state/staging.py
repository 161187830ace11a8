"""Decoded and checked blocks of an anchor, kept in memory or on disk until its last part is checked."""

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from pulsesync.core import digest, headroom
from pulsesync.core.scratch import make_private
from pulsesync.core.types import Bits, Sum, Tile
from pulsesync.errors import StoreError, VerificationError
from pulsesync.format.patch import WholeBlock

GRANT = 1 << 28  # bytes for which memory is checked at a time: a check takes a millisecond
SLAB = 1 << 26  # bytes of these that a thread reserves at a time
LINE = 64  # bytes to which blocks are aligned in memory
_NOTHING = np.empty(0, np.uint8)


class StagedBlocks:
    """Decoded blocks, in memory as far as the machine can spare it, and the rest in an unnamed file of a folder.

    The file is for this process alone: no other can open it, and it is gone when this one ends. So blocks are not
    hashed and decoded again when they are read. The digest of what the disk returns is still checked, like that of all
    weights from outside the process. Without a folder it is the system's temporary one.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.blocks: list[WholeBlock] = []
        self._folder = folder or Path(tempfile.gettempdir())
        self._mine = _ThreadMemory()
        self._granted = 0  # bytes that may still be reserved
        self._in_memory = True  # until the machine can spare no more
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def room_for(self, block: WholeBlock) -> Bits | None:
        """Memory to decode a block into, which is not copied if the block is added next; None: there is none to spare.

        It belongs to this thread, until the thread asks for the next.
        """
        mine, kind = self._mine, block.tile.tensor.kind
        size = block.size * kind.itemsize
        if size > mine.slab.size:
            mine.slab = self._new_slab(max(SLAB, size))
        mine.room = mine.slab[:size].view(kind.bits) if size <= mine.slab.size else None
        return mine.room

    def add(self, block: WholeBlock, bits: Bits, total: Sum) -> None:
        """Keep a block with these weights and this digest. Any thread may call this. Raises: StoreError."""
        if (room := self._mine.room) is not bits and (room := self.room_for(block)) is not None:
            room[:] = bits
        if room is None:
            data = np.ascontiguousarray(bits).view(np.uint8)
            decode: Callable[[Bits], None] = partial(self._read, block.tile, block.number, total, self._write(data))
        else:
            self._mine.slab = self._mine.slab[-(-room.nbytes // LINE) * LINE :]
            self._mine.room, decode = None, partial(_copy, room)
        with self._lock:
            self.blocks.append(WholeBlock(block.tile, block.number, decode))

    def _new_slab(self, size: int) -> NDArray[np.uint8]:
        """New memory; empty if there is none to spare."""
        with self._lock:
            if self._in_memory and self._granted < size:
                self._in_memory = headroom.can_take(grant := max(GRANT, size))
                self._granted += grant
            self._granted -= size
            return _map_memory(size) if self._in_memory else _NOTHING

    def _write(self, data: NDArray[np.uint8]) -> int:
        """Append bytes to the file; return where they begin."""
        with self._translated():
            with self._lock:
                begin, self._end = self._end, self._end + data.size
                if self._file is None:
                    make_private(self._folder)
                    self._file = tempfile.TemporaryFile(buffering=0, dir=self._folder)  # noqa: SIM115 - see `close`
            written = 0
            while written < data.size:
                written += os.pwrite(self._file.fileno(), data[written:].data, begin + written)
        return begin

    def _read(self, tile: Tile, number: int, total: Sum, begin: int, out: Bits) -> None:
        """Read the weights of a block into contiguous memory."""
        assert self._file is not None
        data = out.view(np.uint8)
        with self._translated():
            read = 0
            while read < data.size:
                some = os.preadv(self._file.fileno(), [data[read:].data], begin + read)
                if not some:
                    raise StoreError(
                        f"a temporary file in {self._folder} was cut off while an anchor was loaded from it; sync again"
                    )
                read += some
        if digest.count_block(tile, number, out) != total:
            raise VerificationError(
                f"digest mismatch: weights in a temporary file in {self._folder} have changed; check the disk, and "
                "sync again"
            )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises: StoreError, for what the disk raises."""
        try:
            yield
        except OSError as e:
            raise StoreError(
                f"cannot use an anchor's temporary file in {self._folder}: {e.strerror}. If the disk is full, make "
                "room; else use another one (cache= of the Subscriber, or TMPDIR)",
                key=str(self._folder),
            ) from e

    def close(self) -> None:
        """Free memory and disk. The blocks can no longer be read."""
        self.blocks.clear()
        self._mine = _ThreadMemory()
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "StagedBlocks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ThreadMemory(threading.local):
    """The rest of the memory that a thread has reserved, and the piece that was last given out."""

    slab: NDArray[np.uint8] = _NOTHING
    room: Bits | None = None


def _map_memory(size: int) -> NDArray[np.uint8]:
    """Memory in huge pages, where available; empty if the system refuses it.

    In pages of 4 KiB, 80 MB take 30 ms of faults, nearly as long as it takes to decode them; in huge ones 2 to 6 ms.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return _NOTHING
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _copy(bits: Bits, out: Bits) -> None:
    out[:] = bits
