"""What one recording comes to: a number for each column of the results."""

import re
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from pulsesync.study.recording import Recording, Step

TROUGH = 10  # steps, whose mean is the trough if no ten in a row are lower
EARLY = 10  # steps, in which an expert may never have changed
SMALLEST = -100  # half powers of two: an update that is as good as none

_EXPERT = re.compile(r"(.*\.experts\.\d+)\.")


def measure(recording: Recording) -> dict[str, float]:
    """Every column that can be filled; shares in per cent."""
    if not recording.steps:
        return {}
    found: dict[str, float] = {}
    for part in (_windows, _profile, _dtypes, _changes, _experts, _reward):
        found.update(part(recording))
    return found


def _windows(recording: Recording) -> dict[str, float]:
    unchanged = [100 - 100 * share for share in recording.density()]
    found = {"k1": fmean(unchanged), "min": min(unchanged)}
    for k in recording.header.windows:
        counts = [sum(step.windows[k]) for step in recording.steps if k in step.windows]
        if k > 1 and counts:
            found[f"k{k}"] = 100 - 100 * fmean(counts) / max(recording.header.sampled, 1)
    return found


def _profile(recording: Recording) -> dict[str, float]:
    """First step, the lowest ten in a row, and the second half of the run."""
    unchanged = [100 - 100 * share for share in recording.density()]
    span = min(TROUGH, len(unchanged))
    means = [fmean(unchanged[begin : begin + span]) for begin in range(len(unchanged) - span + 1)]
    lowest = min(range(len(means)), key=means.__getitem__)
    middle = float(recording.steps[lowest].step + span // 2)
    return {
        "first": unchanged[0], "trough": means[lowest], "trough step": middle,
        "plateau": fmean(unchanged[len(unchanged) // 2 :]),
    }  # fmt: skip


def _dtypes(recording: Recording) -> dict[str, float]:
    found = {recording.header.dtype: 100 - 100 * fmean(recording.density())}
    for dtype in recording.header.contrast:
        counts = [sum(step.contrast[dtype]) for step in recording.steps if dtype in step.contrast]
        if counts:
            found[dtype] = 100 - 100 * fmean(counts) / max(recording.header.sampled, 1)
    return found


def _changes(recording: Recording) -> dict[str, float]:
    steps, half = recording.steps, recording.steps[len(recording.steps) // 2 :]
    found = {
        "one unit": _share(
            sum(step.units.get(1, 0) for step in steps), sum(sum(step.units.values()) for step in steps)
        ),
        "overlap early": _overlap(steps[1:3]),
        "overlap late": _overlap(half),
        "same way": _share(sum(step.same_way for step in half), sum(step.again for step in half)),
        "inactive": 100 * fmean(sum(count == 0 for count in step.changed) / len(step.changed) for step in steps),
        "bits": _bits(steps),
        "moved": _moved(half),
        "median": recording.header.facts.get("median"),
    }
    counted = [sum(step.gradients) for step in steps if step.gradients]
    if counted:
        found["gradients"] = 100 * fmean(counted) / max(recording.header.sampled, 1)
    return {name: float(value) for name, value in found.items() if value is not None}


def _overlap(steps: Iterable[Step]) -> float | None:
    """Of the weights that changed, how many had changed in the step before."""
    steps = list(steps)
    return _share(sum(step.again for step in steps), sum(step.all_changed for step in steps))


def _bits(steps: Iterable[Step]) -> float | None:
    """Bits per change of the codec that is shortest over these steps, made where it was made, else predicted."""
    steps = [step for step in steps if step.all_changed and step.sizes]
    codecs = set.intersection(*(set(step.sizes) for step in steps)) if steps else set()
    if not codecs:
        return None
    total: Counter[str] = Counter()
    for step in steps:
        for codec in codecs:
            total[codec] += step.sizes[codec].best
    return 8 * min(total.values()) / sum(step.all_changed for step in steps)


def _moved(steps: Iterable[Step]) -> float | None:
    """The mean size of an update over the learning rate; sizes are known to the root of two."""
    total: Counter[int] = Counter()
    for step in steps:
        total.update(step.moved)
    sizes = {place: 2 ** ((place + 0.5) / 2) if place > SMALLEST else 0.0 for place in total}
    return sum(count * sizes[place] for place, count in total.items()) / total.total() if total else None


def _experts(recording: Recording) -> dict[str, float]:
    """How many experts change in a step, how many never do early on, and how uneven it is."""
    own = [_EXPERT.match(tensor.name) for tensor in recording.header.tensors]
    sizes: Counter[str] = Counter()
    for found, tensor in zip(own, recording.header.tensors, strict=True):
        if found:
            sizes[found[1]] += tensor.size
    if not sizes:
        return {}
    by_step = []
    for step in recording.steps:
        counts: Counter[str] = Counter()
        for found, count in zip(own, step.changed, strict=True):
            if found:
                counts[found[1]] += count
        by_step.append(counts)
    early = sum((+counts for counts in by_step[:EARLY]), Counter[str]())
    shares = sorted(sum(counts[name] for counts in by_step) / sizes[name] / len(by_step) for name in sizes)
    return {
        "experts": float(len(sizes)),
        "experts changed": 100 * fmean(len(+counts) / len(sizes) for counts in by_step),
        "experts never": 100 - 100 * len(early) / len(sizes),
        "least expert": 100 * shares[0], "most expert": 100 * shares[-1],
    }  # fmt: skip


def _reward(recording: Recording) -> dict[str, float]:
    rewards = [float(step.facts["reward"]) for step in recording.steps if "reward" in step.facts]
    if not rewards:
        return {}
    span = max(1, len(rewards) // 10)
    return {"reward first": fmean(rewards[:span]), "reward last": fmean(rewards[-span:])}


def _share(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None
