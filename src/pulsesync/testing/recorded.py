"""Read a slice of a recorded training run: a few whole tensors, every optimizer step, bit for bit.

The file is a plain `.npz`: `names`; `start/<name>`, the BF16 bits before the first step; and for each step the changed
positions of the tensors laid end to end, as `gaps/<step>` (unchanged weights before each change), and `flips/<step>`
(old XOR new). Kept this simple so that a test can rely on it without relying on the code under test.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pulsesync.testing.updates import Bits16, split_tensors


@dataclass(frozen=True)
class RecordedSlice:
    """Some tensors of a run over its steps; the tensors follow each other in the order of names."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    start: dict[str, Bits16]
    # For each step: (n,) positions in all tensors, ascending, and (n,) old XOR new.
    changes: list[tuple[npt.NDArray[np.int64], Bits16]]

    def __len__(self) -> int:
        """How many optimizer steps there are."""
        return len(self.changes)

    def states(self) -> Iterator[tuple[int, dict[str, Bits16], dict[str, Bits16]]]:
        """Yield (step, old, new) for every step; new is the next step's old, so treat both as read-only."""
        shapes = dict(zip(self.names, self.shapes, strict=True))
        old = np.concatenate([self.start[name].reshape(-1) for name in self.names])
        for step, (positions, flips) in enumerate(self.changes):
            new = old.copy()
            new[positions] ^= flips
            yield step, split_tensors(old, shapes), split_tensors(new, shapes)
            old = new

    def final_sha256(self) -> str:
        """SHA-256 of the last state: every tensor's little-endian bits, one after another."""
        flat = np.concatenate([self.start[name].reshape(-1) for name in self.names])
        for positions, flips in self.changes:
            flat[positions] ^= flips
        return hashlib.sha256(flat.astype("<u2").tobytes()).hexdigest()


def load_recorded(path: str | Path) -> RecordedSlice:
    """Load a slice and check that its steps lead to the recorded state.

    Raises:
        ValueError: they do not.
    """
    with np.load(path, allow_pickle=False) as file:
        names = [str(name) for name in file["names"]]
        start = {name: file[f"start/{name}"] for name in names}
        steps = sum(key.startswith("gaps/") for key in file.files)
        changes = [
            (np.cumsum(file[f"gaps/{step}"].astype(np.int64) + 1) - 1, file[f"flips/{step}"]) for step in range(steps)
        ]
        expected = str(file["final_sha256"])
    recorded = RecordedSlice(names, [start[name].shape for name in names], start, changes)
    actual = recorded.final_sha256()
    if actual != expected:
        raise ValueError(f"{path}: the last state has SHA-256 {actual}, expected {expected}")
    return recorded
