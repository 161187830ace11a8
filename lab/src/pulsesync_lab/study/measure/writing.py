"""Where a recorder writes: lines of a file, one file per rank, or memory."""

from pathlib import Path
from typing import TextIO

from pulsesync.errors import PulseError
from pulsesync_lab.study.measure.holdings import rank_and_size
from pulsesync_lab.study.recording import Recording, RecordingHeader, Step, header_line, step_line


class RecordingWriter:
    """A recording that grows. With a file nothing is kept in memory; the file is created, empty, at once.

    Raises:
        PulseError: the file exists, or cannot be written.
    """

    def __init__(self, out: str | Path | None) -> None:
        self._out = None if out is None else Path(out)
        self._file: TextIO | None = None
        self._header: RecordingHeader | None = None
        self._steps: list[Step] = []
        if self._out is not None:
            self._file = _create(_of_rank(self._out))

    @property
    def begun(self) -> bool:
        return self._header is not None

    def begin(self, header: RecordingHeader) -> None:
        """Write the first line. A rank that counts nothing does so, too: otherwise its file would seem lost."""
        if self._out is not None and self._file is not None:
            if Path(self._file.name) != (place := _of_rank(self._out)):  # ranks were assigned since then
                self.close()
                self._file = _create(place)
            self._write(header_line(header))
        self._header = header

    def add(self, step: Step) -> None:
        if self._file is None:
            self._steps.append(step)
        elif self._header is not None and self._header.tensors:
            self._write(step_line(step))

    def _write(self, line: str) -> None:
        assert self._file is not None
        self._file.write(f"{line}\n")
        self._file.flush()

    def recording(self, dtype: str) -> Recording:
        """All of it so far."""
        if self._file is not None and self.begun:
            return Recording.read(self._file.name)
        return Recording(self._header or RecordingHeader(dtype, ()), tuple(self._steps))

    def close(self) -> None:
        """Remove a file without content."""
        if self._file is None or self._file.closed:
            return
        self._file.close()
        if not self.begun:
            Path(self._file.name).unlink(missing_ok=True)


def _of_rank(out: Path) -> Path:
    rank, size = rank_and_size()
    return out.with_name(f"{out.stem}-rank{rank}{out.suffix}") if size > 1 else out


def _create(place: Path) -> TextIO:
    if place.exists():
        raise PulseError(f"{place} already exists: record to another file, or move it away")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return place.open("x", encoding="utf-8")
    except OSError as e:
        raise PulseError(f"cannot write {place}: {e}") from e
