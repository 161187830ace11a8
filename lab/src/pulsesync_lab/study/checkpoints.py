"""Checkpoints in the order in which a run wrote them: files, folders, a folder of such as step_200."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pulsesync.errors import NotFoundError

_DIGITS = re.compile(r"(\d+)")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def find_checkpoints(places: Sequence[str]) -> list[tuple[int, Path]]:
    """(step, file or folder) of each checkpoint: in the given order, and in each folder by number.

    The step is the last number in a name, if these grow from one to the next; otherwise they are counted from 0.

    Raises:
        NotFoundError: there is none.
    """
    found = [path for place in places for path in _expand(Path(place))]
    steps = [number(path) for path in found]
    numbers = [step for step in steps if step is not None]
    if len(numbers) == len(found) and all(a < b for a, b in pairwise(numbers)):
        return list(zip(numbers, found, strict=True))
    return list(enumerate(found))


def number(path: Path) -> int | None:
    """The last number in a checkpoint's name."""
    numbers = _DIGITS.findall(path.name.removesuffix(".safetensors"))
    return int(numbers[-1]) if numbers else None


def _expand(path: Path) -> list[Path]:
    if not path.exists():
        raise NotFoundError(f"{path} does not exist", key=str(path))
    if not path.is_dir():
        return [path]
    folders = [child for child in path.iterdir() if child.is_dir() and any(child.glob("*.safetensors"))]
    if folders:
        return sorted(folders, key=natural)
    files = list(path.glob("*.safetensors"))
    if not files:
        raise NotFoundError(f"{path} has no checkpoints, no run and no recording", key=str(path))
    whole = (path / "model.safetensors").exists() or any(path.glob("*.safetensors.index.json"))
    shards = any(_SHARD.search(file.name) for file in files)
    return [path] if whole or shards or len(files) == 1 else sorted(files, key=natural)


def natural(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts step-9 before step-10."""
    pieces = _DIGITS.split(path.name)
    return [(piece.isdigit(), int(piece) if piece.isdigit() else 0, piece) for piece in pieces if piece]
