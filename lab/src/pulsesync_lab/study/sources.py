"""From recorded files, a run or checkpoints to recordings.

    recording = open_recording(["checkpoints/"])
    recording = open_recording(["study-rank0.jsonl", "study-rank1.jsonl"])      # ranks of one run are added up
    several = open_recordings(["lr1e-6.jsonl", "lr3e-6.jsonl"])                 # by name

Runs and checkpoints are measured when they are opened. Memory has the current state, the one before it and a byte for
each weight.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pulsesync.core.location import ParsedLocation
from pulsesync.core.progress import Report, quietly
from pulsesync.errors import NotFoundError, StateError
from pulsesync.state.checkpoint_files import open_checkpoint
from pulsesync.state.views import view_bits
from pulsesync.store import Store, open_store
from pulsesync_lab.study.checkpoints import find_checkpoints
from pulsesync_lab.study.recorder import Recorder
from pulsesync_lab.study.recording import FORMAT, PatchBytes, Recording, Step
from pulsesync_lab.study.versions import ReplayedVersion, Versions, main_dtype, other_dtypes

CONTRAST = ("BF16", "F16", "F8_E4M3", "F32")  # dtypes in which FP32 checkpoints are compared
_RANK = re.compile(r"-rank\d+(?=\.jsonl$)")  # the part in which the file names of one run's ranks differ


@dataclass(frozen=True)
class MeasureSettings:
    """How a run or checkpoints are measured."""

    dtype: str = "BF16"  # that inference uses, if checkpoints are in FP32
    sample: int = 1 << 20
    headers: bool = False  # of a run, use only the headers of its patches
    limit: int = 0  # the newest steps, 0 for all
    trust: Collection[str] | None = None
    open: Callable[[str], Store] = open_store
    progress: Report = quietly


def open_recording(
    places: Sequence[str], *, trust: Collection[str] | None = None, progress: Report = quietly
) -> Recording:
    """The recording of one run, from recorded files, a run or checkpoints.

    Raises:
        ValueError: the places have several runs, or are of different kinds; NotFoundError, FormatError, StateError, …
    """
    found = open_recordings(places, MeasureSettings(trust=trust, progress=progress))
    if len(found) != 1:
        raise ValueError(f"expected one run, but found {len(found)}: {', '.join(found)}")
    return next(iter(found.values()))


def open_recordings(places: Sequence[str], how: MeasureSettings | None = None) -> dict[str, Recording]:
    """Recordings by name: one of each run, however many files its ranks wrote; checkpoints are all of one.

    Raises:
        ValueError: no place, or places of different kinds; NotFoundError: a place is empty; FormatError: a file is bad;
        StateError: checkpoints do not have the same tensors; StoreError, MissingLinkError: a run cannot be read.
    """
    how = how or MeasureSettings()
    kinds = {kind_of(place) for place in places}
    if len(kinds) != 1:
        got = " and ".join(sorted(kinds)) or "nothing"
        raise ValueError(f"give recorded files, runs or checkpoints, of one kind; got {got}")
    kind = kinds.pop()
    if kind == "recorded files":
        found = _read_files(places)
    elif kind == "runs":
        found = {place: _measure_run(how.open(run_at(place) or place), how) for place in places}
    else:
        found = {_title(places): _measure_checkpoints(places, how)}
    return {name: _newest(recording, how.limit) for name, recording in found.items()}


def kind_of(place: str) -> Literal["recorded files", "runs", "checkpoints"]:
    """The kind of a place, by its contents; a URL is a run. Raises: ValueError, if it is not a location."""
    path = ParsedLocation.parse(place).path
    if path is None or "://" in place or run_at(place):
        return "runs"
    if path.suffix == ".jsonl" or (path.is_dir() and _recordings_in(path)):
        return "recorded files"
    return "checkpoints"


def run_at(place: str) -> str | None:
    """The run in a folder, or in the store of a `pulse demo` that was written there."""
    found = (str(path) for path in (Path(place), Path(place, "store")) if (path / "manifests").is_dir())
    return next(found, None)


# Recorded files


def _read_files(places: Sequence[str]) -> dict[str, Recording]:
    files = [file for place in places for file in files_at(place)]
    groups: dict[tuple[str, bool], list[Recording]] = {}
    for file in {file.resolve(): file for file in files}.values():  # each once
        if not file.exists():
            raise NotFoundError(f"{file} does not exist", key=str(file))
        run = _RANK.sub("", str(file))
        groups.setdefault((run, run != str(file)), []).append(Recording.read(file))
    return {
        f"{run}, ranks" if of_ranks and (run, False) in groups else run:  # next to their sum, which is not of one rank
        Recording.join(parts) if of_ranks else parts[0]
        for (run, of_ranks), parts in groups.items()
    }


def files_at(place: str) -> list[Path]:
    """The recordings in a folder, or the file itself."""
    return _recordings_in(Path(place)) or [Path(place)]


def _recordings_in(folder: Path) -> list[Path]:
    """The recordings among the .jsonl files of a folder."""
    return [file for file in sorted(folder.glob("*.jsonl")) if _is_recording(file)] if folder.is_dir() else []


def _is_recording(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(16).startswith(f'{{"study": {FORMAT}'.encode())


def _title(places: Sequence[str]) -> str:
    first = Path(places[0])
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return f"{first.name or first}{more}"


def _newest(recording: Recording, limit: int) -> Recording:
    return replace(recording, steps=recording.steps[-limit:]) if limit else recording


# Runs and checkpoints


def _measure_run(store: Store, how: MeasureSettings) -> Recording:
    versions = Versions(store, how.trust, how.limit)
    if how.headers:
        return versions.counted()
    recorder = _plain(versions.dtype, how.sample)
    steps = (_look(recorder, reached, how.progress) for reached in versions.replay())
    return _recorded(recorder, steps, versions.others)


def _look(recorder: Recorder, reached: ReplayedVersion, progress: Report) -> Step | None:
    step = recorder.feed(reached.tensors, reached.step, **reached.facts)
    progress(reached.number, reached.of, f"version {reached.facts['version']}")
    return None if step is None else replace(step, sizes=_with_real(step, reached.real))


def _with_real(step: Step, real: Mapping[str, int]) -> dict[str, PatchBytes]:
    """Predicted sizes, together with those of the published patch."""
    known = dict(step.sizes)
    for codec, size in real.items():
        known[codec] = PatchBytes(known[codec].predicted if codec in known else None, size)
    return known


def _measure_checkpoints(places: Sequence[str], how: MeasureSettings) -> Recording:
    found = find_checkpoints(places)
    found = found[-how.limit - 1 :] if how.limit else found  # and the one before the first
    if len(found) < 2:
        raise NotFoundError(
            f"two checkpoints at least are needed to compare; found only {found[0][1]}", key=str(found[0][1])
        )
    first = open_checkpoint(found[0][1]).tensors
    specs = [view.spec for view in view_bits(first)[0].values()]
    dtype = main_dtype(specs, found[0][1])
    others = [other for other in CONTRAST if other != how.dtype]
    exact = Recorder(dtype=how.dtype, contrast=others, sample=how.sample) if dtype == "F32" else None
    recorder = exact or _plain(dtype, how.sample)
    steps = (_feed(recorder, first, step, path) for step, path in _with_progress(found, how.progress))
    return _recorded(recorder, steps, {} if exact else other_dtypes(specs, dtype))


def _with_progress(found: Sequence[tuple[int, Path]], progress: Report) -> Iterator[tuple[int, Path]]:
    for number, (step, path) in enumerate(found, 1):
        yield step, path
        progress(number, len(found), path.name)


def _feed(recorder: Recorder, first: Mapping[str, Any], step: int, path: Path) -> Step | None:
    tensors = open_checkpoint(path).tensors
    odd = [name for name in sorted(tensors.keys() | first.keys()) if _form(tensors, name) != _form(first, name)]
    if odd:
        raise StateError(
            f"tensor {odd[0]!r} of {path} does not have the dtype and shape that it has in the first checkpoint",
            tensor=odd[0],
        )
    return recorder.feed(tensors, step, checkpoint=path.name)


def _form(tensors: Mapping[str, Any], name: str) -> object:
    return (tensors[name].dtype, tensors[name].shape) if name in tensors else None


def _plain(dtype: str, sample: int) -> Recorder:
    """For published weights: their values in other dtypes are no longer known."""
    return Recorder(dtype=dtype, contrast=(), sample=sample)


def _recorded(recorder: Recorder, steps: Iterable[Step | None], others: Mapping[str, str]) -> Recording:
    """What was measured, and which tensors were cast, from which dtypes.

    Whether the trainer has masters cannot be seen from what it published.
    """
    looked = tuple(step for step in steps if step is not None)
    header = recorder.close().header
    facts = {name: fact for name, fact in header.facts.items() if name != "masters" or fact == "F32"}
    cast = {tensor.name: others[tensor.name] for tensor in header.tensors if tensor.name in others}
    return Recording(replace(header, facts=facts | ({"cast": cast} if cast else {})), looked)
