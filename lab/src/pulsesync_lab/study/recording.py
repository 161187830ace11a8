"""A recording of a run's weights, step by step: a file of JSON lines, of which the first is a header.

    recording = Recording.read("study.jsonl")
    for step in recording.steps:
        print(step.step, 1 - step.all_changed / recording.size)

Counts are stored, not shares, so that the parts of a sharded run add up, and the reader chooses the denominator. A line
is written when its step is done: a run that was killed leaves a readable file.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pulsesync.errors import FormatError

FORMAT = 1
WINDOWS = (1, 2, 4, 8, 16, 32)  # steps

Counts = Mapping[int, int]


@dataclass(frozen=True)
class WatchedTensor:
    """A tensor, and how much of it is compared."""

    name: str
    shape: tuple[int, ...]
    size: int  # weights that are compared at every step: all local weights, or those in the sample
    sampled: int  # weights in the sample


@dataclass(frozen=True)
class RecordingHeader:
    """What a recording measures. The sample is a fixed choice of weights, the same at every step."""

    dtype: str  # the one that inference uses
    tensors: tuple[WatchedTensor, ...]
    windows: tuple[int, ...] = WINDOWS
    contrast: tuple[str, ...] = ()  # other dtypes, on the sample
    facts: Mapping[str, Any] = field(default_factory=dict)  # optimizer, betas, seed, and other facts of its writer

    @property
    def size(self) -> int:
        return sum(tensor.size for tensor in self.tensors)

    @property
    def sampled(self) -> int:
        return sum(tensor.sampled for tensor in self.tensors)


@dataclass(frozen=True)
class PatchBytes:
    """The size of a patch under one codec: predicted, if there are enough counts; real, if it was made."""

    predicted: int | None
    real: int | None = None

    @property
    def best(self) -> int:
        """The real size if there is one."""
        return (self.predicted if self.real is None else self.real) or 0


@dataclass(frozen=True)
class Step:
    """One optimizer step, or the steps between two states that were fed. Tuples are by tensor."""

    step: int
    changed: tuple[int, ...]  # weights whose bits differ from a step before
    again: int = 0  # number of these that also changed in the step before
    same_way: int = 0  # number of these that changed in the same direction
    up: int = 0  # number of changes to a larger value
    units: Counts = field(
        default_factory=dict
    )  # by units of the last place: 1 to 15; 16 is 16 to 31, 32 is 32 to 63 ...
    by_class: Counts = field(default_factory=dict)  # changes by the exponent bits of the old weight
    weights_by_class: Counts = field(default_factory=dict)  # all weights that are compared, by the same
    windows: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # in the sample: changed since k steps before
    contrast: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # in the sample: changed in another dtype
    gradients: tuple[int, ...] = ()  # in the sample: not zero
    # In the sample: updates by floor(2 log2(size / learning rate)), with the rate of each weight's own group; the
    # smallest, -254, is no update at all. They add up to the sample, except for weights that became infinite or NaN or
    # whose rate is 0.
    moved: Counts = field(default_factory=dict)
    hot: float | None = None  # share of the weights that are hot for `context`
    sizes: Mapping[str, PatchBytes] = field(default_factory=dict)  # by codec
    lr: float | None = None
    seconds: float | None = None  # taken by recording
    facts: Mapping[str, Any] = field(default_factory=dict)  # reward, loss, ...

    @property
    def all_changed(self) -> int:
        return sum(self.changed)


@dataclass(frozen=True)
class Recording:
    """A header and the steps in order."""

    header: RecordingHeader
    steps: tuple[Step, ...]

    @property
    def size(self) -> int:
        return self.header.size

    def density(self) -> list[float]:
        """The share of weights that changed, step by step."""
        return [step.all_changed / max(self.size, 1) for step in self.steps]

    @classmethod
    def read(cls, path: str | Path) -> "Recording":
        """Read a file; an incomplete last line is left out.

        Raises:
            FormatError: it is not a recording, or one of a later format.
        """
        try:
            lines = Path(path).read_text("utf-8").split("\n")
        except UnicodeDecodeError as e:
            raise FormatError(f"{path} is not a recording: {e}") from e
        head = _parse(path, lines[0])
        if not isinstance(head, dict) or head.get("study") != FORMAT:
            raise FormatError(
                f"{path} is not a recording, or one of a format that this version of pulsesync cannot read"
            )
        complete = lines[1:-1]  # the text after the last newline is incomplete
        try:
            return cls(_header(head), tuple(_step(_parse(path, line)) for line in complete if line))
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise FormatError(f"{path} is damaged: {e!r}") from e

    def write(self, path: str | Path) -> None:
        Path(path).write_text("".join(f"{line}\n" for line in (header_line(self.header), *map(step_line, self.steps))))

    @staticmethod
    def join(parts: "Sequence[Recording]") -> "Recording":
        """Add up the recordings of the ranks of a sharded run; steps that some did not reach are left out.

        Raises:
            FormatError: a rank is missing.
        """
        _check_ranks([part.header.facts for part in parts])
        parts = [part for part in parts if part.header.tensors] or parts  # the others have only copies
        first = parts[0].header
        seen: dict[str, WatchedTensor] = {}
        for tensor in (tensor for part in parts for tensor in part.header.tensors):
            known = seen.get(tensor.name, WatchedTensor(tensor.name, tensor.shape, 0, 0))
            seen[tensor.name] = WatchedTensor(
                tensor.name, known.shape, known.size + tensor.size, known.sampled + tensor.sampled
            )
        contrast = tuple(d for d in first.contrast if all(d in part.header.contrast for part in parts))
        facts = {name: fact for name, fact in first.facts.items() if name != "rank" or "ranks" not in first.facts}
        header = RecordingHeader(first.dtype, tuple(seen.values()), first.windows, contrast, facts)
        by_step = [{step.step: step for step in part.steps} for part in parts]
        common = sorted(set.intersection(*(set(steps) for steps in by_step)))
        names = [[tensor.name for tensor in part.header.tensors] for part in parts]
        steps = tuple(_sum(list(seen), names, [steps[number] for steps in by_step], header) for number in common)
        return Recording(header, steps)


def _check_ranks(facts: Sequence[Mapping[str, Any]]) -> None:
    """Every rank writes a file, so a missing one was lost."""
    found = [(one["rank"], one["ranks"]) for one in facts if "rank" in one and "ranks" in one]
    missing = sorted(set(range(max((ranks for _, ranks in found), default=0))) - {rank for rank, _ in found})
    if missing:
        raise FormatError(f"the recording of rank {', '.join(map(str, missing))} of {found[0][1]} ranks is missing")


def header_line(header: RecordingHeader) -> str:
    tensors = [[tensor.name, list(tensor.shape), tensor.size, tensor.sampled] for tensor in header.tensors]
    return json.dumps(
        {
            "study": FORMAT,
            "dtype": header.dtype,
            "windows": header.windows,
            "contrast": header.contrast,
            "facts": dict(header.facts),
            "tensors": tensors,
        }
    )


def step_line(step: Step) -> str:
    fields = {name: value for name, value in vars(step).items() if value not in (None, (), {})}
    fields["sizes"] = {codec: [size.predicted, size.real] for codec, size in step.sizes.items()}
    return json.dumps({name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()})


def _parse(path: str | Path, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as e:
        raise FormatError(f"{path} is not a recording: {e}") from e


def _header(facts: Mapping[str, Any]) -> RecordingHeader:
    tensors = tuple(WatchedTensor(name, tuple(shape), size, sampled) for name, shape, size, sampled in facts["tensors"])
    return RecordingHeader(facts["dtype"], tensors, tuple(facts["windows"]), tuple(facts["contrast"]), facts["facts"])


def _step(facts: dict[str, Any]) -> Step:
    for name in ("units", "by_class", "weights_by_class", "moved"):
        facts[name] = {int(key): count for key, count in facts.get(name, {}).items()}
    facts["changed"] = tuple(facts["changed"])
    facts["gradients"] = tuple(facts.get("gradients", ()))
    facts["windows"] = {int(k): tuple(counts) for k, counts in facts.get("windows", {}).items()}
    facts["contrast"] = {dtype: tuple(counts) for dtype, counts in facts.get("contrast", {}).items()}
    facts["sizes"] = {codec: PatchBytes(*size) for codec, size in facts.get("sizes", {}).items()}
    return Step(**facts)


def _sum(names: Sequence[str], theirs: Sequence[Sequence[str]], steps: Sequence[Step], header: RecordingHeader) -> Step:
    """One step, summed over all ranks."""

    def by_tensor(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
        total: Counter[str] = Counter()
        for own, some in zip(theirs, counts, strict=True):
            total.update(dict(zip(own, some, strict=False)))
        return tuple(total[name] for name in names)

    def added(counts: Iterable[Counts]) -> Counts:
        total: Counter[int] = Counter()
        for some in counts:
            total.update(some)
        return dict(sorted(total.items()))

    hot = [(step.hot or 0.0) * sum(step.weights_by_class.values()) for step in steps]
    weighed = sum(sum(step.weights_by_class.values()) for step in steps)
    seconds = [step.seconds for step in steps if step.seconds is not None]
    codecs = set.intersection(*(set(step.sizes) for step in steps))
    return Step(
        steps[0].step,
        by_tensor(step.changed for step in steps),
        sum(step.again for step in steps),
        sum(step.same_way for step in steps),
        sum(step.up for step in steps),
        added(step.units for step in steps),
        added(step.by_class for step in steps),
        added(step.weights_by_class for step in steps),
        {k: by_tensor(s.windows[k] for s in steps) for k in header.windows if all(k in s.windows for s in steps)},
        {d: by_tensor(s.contrast[d] for s in steps) for d in header.contrast if all(d in s.contrast for s in steps)},
        by_tensor(step.gradients for step in steps) if any(step.gradients for step in steps) else (),
        added(step.moved for step in steps),
        sum(hot) / weighed if weighed else None,
        {codec: _total([step.sizes[codec] for step in steps]) for codec in sorted(codecs)},
        steps[0].lr,
        max(seconds, default=None),
        steps[0].facts,
    )


def _total(sizes: Sequence[PatchBytes]) -> PatchBytes:
    return PatchBytes(_all_of([size.predicted for size in sizes]), _all_of([size.real for size in sizes]))


def _all_of(numbers: Sequence[int | None]) -> int | None:
    """Their sum, if all are known."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
