"""The figures of one recording: a number for each column of the results."""

from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from pulsesync_lab.study.recording import Recording, Step
from pulsesync_lab.study.report import findings

TROUGH = 10  # the trough is the lowest mean of this number of consecutive steps
EARLY = 10  # steps, in which an expert may never have changed
SMALLEST = -100  # half powers of two: an update that counts as none
MILLIONTH = 1e-6
WIDER = ("F32", "F16")  # than BF16: more bits of the fraction


def measure(recording: Recording) -> dict[str, float]:
    """Every column that can be filled; shares in per cent."""
    if not recording.steps:
        return {}
    found: dict[str, float] = {}
    for part in (_windows, _profile, _dtypes, _changes, _experts, _reward):
        found.update(part(recording))
    return found


def _windows(recording: Recording) -> dict[str, float]:
    unchanged = findings.sparsity(recording)
    found = {"k1": 100 * fmean(unchanged), "min": 100 * min(unchanged)}
    for k in recording.header.windows:
        if k > 1:
            found |= _mean(f"k{k}", findings.window_sparsity(recording, k))
    return found


def _profile(recording: Recording) -> dict[str, float]:
    """First step, the lowest ten in a row, and the second half of the run."""
    unchanged = [100 * share for share in findings.sparsity(recording)]
    span = min(TROUGH, len(unchanged))
    means = [fmean(unchanged[begin : begin + span]) for begin in range(len(unchanged) - span + 1)]
    lowest = min(range(len(means)), key=means.__getitem__)
    middle = float(recording.steps[lowest].step + span // 2)
    return {
        "first": unchanged[0],
        "trough": means[lowest],
        "trough step": middle,
        "plateau": fmean(unchanged[len(unchanged) // 2 :]),
    }


def _dtypes(recording: Recording) -> dict[str, float]:
    """All dtypes of the sample, except those with more precision than the weights, which would show lost updates."""
    header = recording.header
    found = _mean(header.dtype, findings.window_sparsity(recording, 1))
    for dtype in header.contrast:
        if _has_masters(recording) or dtype not in WIDER:
            found |= _mean(dtype, findings.dtype_sparsity(recording, dtype))
    return found


def _changes(recording: Recording) -> dict[str, float]:
    steps, half = recording.steps, recording.steps[len(recording.steps) // 2 :]
    shares = {
        "one unit": findings.shares(step.units for step in steps).get(1),
        "overlap early": findings.share(steps[1:3], "again", "all_changed"),
        "overlap late": findings.share(half, "again", "all_changed"),
        "same way": findings.share(half, "same_way", "again"),
        "inactive": fmean(sum(count == 0 for count in step.changed) / len(step.changed) for step in steps),
    }
    found = {name: 100 * share for name, share in shares.items() if share is not None}
    others = {
        "bits": _bits(steps),
        "moved": _moved(half, recording.header.sampled) if _has_masters(recording) else None,
        "median": recording.header.facts.get("median"),
    }
    found |= {name: float(value) for name, value in others.items() if value is not None}
    return found | _mean("gradients", findings.gradient_density(recording))


def _has_masters(recording: Recording) -> bool:
    """Whether updates too small for BF16 are kept; older recordings do not state rounding after each step."""
    return bool(recording.header.facts.get("arm", {}).get("masters", "fp32") == "fp32")


def _bits(steps: Iterable[Step]) -> float | None:
    """Bits per change of the codec that is shortest over these steps, real if it was made, else predicted."""
    steps = [step for step in steps if step.all_changed and step.sizes]
    codecs = set.intersection(*(set(step.sizes) for step in steps)) if steps else set()
    if not codecs:
        return None
    total: Counter[str] = Counter()
    for step in steps:
        for codec in codecs:
            total[codec] += step.sizes[codec].best
    return 8 * min(total.values()) / sum(step.all_changed for step in steps)


def _moved(steps: Iterable[Step], sampled: int) -> float | None:
    """The mean size of an update in millionths, over all weights of the sample.

    Sizes are known up to a factor of the square root of two.
    """
    means = [step.lr * _sizes(step) / max(sampled, 1) for step in steps if step.lr is not None and step.moved]
    return fmean(means) / MILLIONTH if means else None


def _sizes(step: Step) -> float:
    """The mean over all updates, divided by the learning rate."""
    return sum(count * 2 ** ((place + 0.5) / 2) for place, count in step.moved.items() if place > SMALLEST)


def _experts(recording: Recording) -> dict[str, float]:
    """How many experts change in a step, how many never do early on, and how uneven it is."""
    experts = list(findings.by_expert(recording).values())
    if not experts:
        return {}
    means = [fmean(densities) for densities in experts]
    return {
        "experts": float(len(experts)),
        "experts changed": 100 * fmean(density > 0 for densities in experts for density in densities),
        "experts never": 100 * fmean(not any(densities[:EARLY]) for densities in experts),
        "least expert": 100 * min(means),
        "most expert": 100 * max(means),
    }


def _reward(recording: Recording) -> dict[str, float]:
    rewards = [float(step.facts["reward"]) for step in recording.steps if "reward" in step.facts]
    if not rewards:
        return {}
    span = max(1, len(rewards) // 10)
    return {"reward first": fmean(rewards[:span]), "reward last": fmean(rewards[-span:])}


def _mean(name: str, shares: Iterable[tuple[int, float]]) -> dict[str, float]:
    """In per cent, over the steps that have one; nothing if none has."""
    values = [share for _, share in shares]
    return {name: 100 * fmean(values)} if values else {}
