"""`pulse plan`: predict what a run would send over its links."""

import json
from pathlib import Path
from typing import Any, Literal

from pulsesync.cli.options import Amount, Count, Json, Natural, Printer, UsageError, read_rate, size
from pulsesync.cli.progress import show_progress
from pulsesync.errors import NotFoundError
from pulsesync_lab.study.predict import evidence, theory
from pulsesync_lab.study.predict.evidence import Evidence
from pulsesync_lab.study.predict.forecast import MOST_STEPS, Optimizer, TrainingSettings
from pulsesync_lab.study.predict.models import ModelFacts, read_model
from pulsesync_lab.study.predict.plan import CODECS, GOAL, LITTLE, SyncPlan, make_plan

NOT_MEASURED = "not measured"
_NAMES = {"full": "full weights", "plain": "plain (4-byte index and value)"}
_BETAS: dict[Optimizer, theory.Betas] = {"adamw": theory.ADAM, "lion": theory.LION}
# Optimizers without a forecast, and the reason.
_NO_THEORY = {
    "muon": "its steps depend on entire matrices, and each implementation scales its learning rate differently",
    "sgd": "its steps are as long as the gradients, which a checkpoint does not contain",
}


def plan(
    *,
    model: Path,
    lr: Amount,
    bandwidth: str,
    step_time: Amount,
    optimizer: Literal["adamw", "lion", "muon", "sgd"] = "adamw",
    betas: str = "",
    dtype: Literal["BF16", "F16", "F8_E4M3", "F8_E5M2", "F32"] = "BF16",
    masters: bool = True,
    warm_up: Count = 0,
    every: Natural = 1,
    cores: Natural | None = None,
    as_json: Json = False,
) -> int:
    """Predict what a run will send, before any training: bytes a sync, seconds, utilisation, bandwidth needed.

    From the magnitudes of the weights, it simulates what the optimizer does to a few thousand of them, and how large
    the patches are. The answer includes how far such forecasts were off on real runs of this kind, or that this was
    not measured.

    Args:
        model: A checkpoint (a safetensors file, or a folder with them), or a config.json, or a folder with that.
        lr: Learning rate.
        bandwidth: Bandwidth of the link to a worker, such as 200mbit or 10gbit.
        step_time: Seconds for an optimizer step with its rollouts, without any sync.
        optimizer: There are forecasts for adamw (Adam, too) and lion; muon and sgd are refused, with the reason.
        betas: The optimizer's betas; 0.9,0.999 for adamw and 0.9,0.99 for lion if not given.
        dtype: The dtype of inference; weights in another dtype are cast.
        masters: Whether the optimizer keeps FP32 master weights; --no-masters if the model is trained in its dtype.
        warm_up: Steps over which the learning rate rises to --lr.
        every: Optimizer steps between two syncs.
        cores: Cores that encode and decode, at each end; those of this machine if not given.
        as_json: Print one JSON object, for machines.

    Raises:
        UsageError: an option is invalid, or there is no forecast for the optimizer.
        PulseError: the model cannot be read.
    """
    known = _known(optimizer)
    training = TrainingSettings(
        _positive(lr, "--lr"), read_betas(betas) if betas else _BETAS[known], warm_up, masters, every, known
    )
    if 2 * every > MOST_STEPS:
        raise UsageError(f"--every must be at most {MOST_STEPS // 2}, because a plan simulates two syncs; got {every}")
    link, step_s = read_rate(bandwidth, "--bandwidth"), _positive(step_time, "--step-time")
    made = make_plan(_look(model, dtype, as_json), training, link, step_s, dtype, cores=cores)
    if as_json:
        print(json.dumps(facts(made)))
        return 0
    for line in _sentences(made):
        print(line)
    print()
    Printer(False).table(_rows(made))
    print()
    for line in _advice(made):
        print(line)
    return 0


def _known(optimizer: str) -> Optimizer:
    for name in _BETAS:
        if name == optimizer:
            return name
    raise UsageError(
        f"--optimizer must be one of {', '.join(_BETAS)}; got {optimizer}, for which there is no forecast: "
        f"{_NO_THEORY[optimizer]}. Measure instead: record some steps with pulsesync_lab.study.Recorder, and show them "
        "with pulse study"
    )


def read_betas(text: str) -> theory.Betas:
    """Read an optimizer's betas from text such as 0.9,0.999. Raises: UsageError."""
    try:
        first, second = (float(beta) for beta in text.split(","))
    except ValueError:
        first = second = -1.0
    if not (0 <= first < 1 and 0 < second < 1):
        raise UsageError(f"--betas must be two numbers from 0 to 1, such as 0.9,0.999; got {text}")
    return first, second


def _positive(number: float, option: str) -> float:
    if not number > 0:
        raise UsageError(f"{option} must be a number above 0; got {number:g}")
    return number


def _look(path: Path, dtype: str, as_json: bool) -> ModelFacts:
    try:
        with show_progress(as_json) as bars:
            return read_model(path, dtype, lambda share: bars.report(int(100 * share), 100, f"reading {path}"))
    except NotFoundError as e:
        raise UsageError(f"--model: {e.reason}") from e


def facts(plan: SyncPlan) -> dict[str, Any]:
    """Return all figures of a plan, for machines: bytes, bits per second, seconds, and shares."""
    told = plan.expected
    average, most = plan.joiner_bytes
    return {
        "model": plan.model.name,
        "source": plan.model.source,
        "weights": plan.model.size,
        "tensors": plan.model.tensors,
        "dtype": plan.dtype,
        "full_bytes": plan.full_bytes,
        "lr": plan.training.lr,
        "optimizer": plan.training.optimizer,
        "betas": plan.training.betas,
        "masters": plan.training.masters,
        "every": plan.training.every,
        "bandwidth": plan.bandwidth,
        "between_s": plan.step_s,
        "changed": {"first": told.first.density, "highest": told.highest.density, "plateau": told.plateau.density},
        "windows": told.windows,
        "critical_magnitude": plan.critical,
        "ways": {
            codec: vars(way) | {"bandwidth_for_90": plan.needed_bandwidth(codec), "sync_s": plan.took.get(codec)}
            for codec, way in plan.options.items()
        },
        "best": plan.best,
        "enough": plan.enough,
        "anchor_syncs": plan.anchor_syncs,
        "joiner_bytes": average,
        "joiner_most_bytes": most,
        "cores": plan.cores,
        "error": {one.kind: _error_facts(one, plan) for one in plan.evidence} or None,
        "unlike_measured": plan.unlike,
    }


def _error_facts(one: Evidence, plan: SyncPlan) -> dict[str, Any]:
    return {
        "runs": one.runs,
        "models": one.models,
        "weights": one.sizes,
        "steps": evidence.STEPS[1],
        "bytes": one.bytes_off,
        "changed": one.density_off,
        "expected_bytes": [round(n) for n in _expected(one, plan)],
    }


def _expected(one: Evidence, plan: SyncPlan) -> tuple[float, float]:
    """Return the least and the most bytes of a sync in the first steps, if the forecast is off as in these runs."""
    low, high = one.bytes_off
    return plan.early_bytes / (1 + high), plan.early_bytes / (1 + low)


def _sentences(plan: SyncPlan) -> list[str]:
    told, every = plan.expected, plan.training.every
    windows = ", ".join(f"{share:.2%} over {k}" for k, share in told.windows.items() if k > 1)
    return [
        f"model     {plan.model.name}: {plan.model.size:,} weights in {plan.model.tensors:,} tensors, "
        f"{size(plan.full_bytes)} in {plan.dtype}; {plan.model.source}",
        f"changes   {told.first.density:.2%} at the first sync, {told.highest.density:.2%} at the highest, "
        f"{told.plateau.density:.2%} later" + (f" (syncs of {every} steps)" if every > 1 else ""),
        f"windows   later, {windows} steps",
        f"critical  {_critical(plan)}",
    ]


def _critical(plan: SyncPlan) -> str:
    sure, never = plan.critical
    below = f"weights below {sure:.2g} change at a step of one learning rate; none" if sure else "no weight"
    above = f"above {never:.2g}" + ("" if sure else " changes at a step of one learning rate")
    return f"fresh from {plan.dtype}, {below} {above}" + (
        "; with masters, steps add up" if plan.training.masters else ""
    )


def _rows(plan: SyncPlan) -> list[dict[str, str]]:
    return [
        {
            "send": _NAMES.get(codec, codec),
            "a sync": size(way.size_bytes),
            "at most": size(way.most_bytes),
            "on the link": f"{way.seconds:,.2f} s",
            "utilisation": f"{way.utilisation:.1%}",
            f"for {GOAL:.0%}": rate(plan.needed_bandwidth(codec)),
        }
        for codec, way in ((codec, plan.options[codec]) for codec in CODECS)
    ]


def _advice(plan: SyncPlan) -> list[str]:
    average, most = plan.joiner_bytes
    lines = [
        f"codec     {_codec(plan)}",
        f"anchors   every {plan.anchor_syncs:,} syncs, when the patches since the last add up to the full weights; "
        f"a late joiner fetches {size(average)} on average, {size(most)} at most, less with pulse squash",
        *_expect(plan),
    ]
    if plan.model.assumed:
        lines.append(
            "          magnitudes were assumed: give a checkpoint instead of its config.json for a better plan"
        )
    if plan.enough:
        share = plan.options["full"].utilisation
        lines.append(f"hint      patches gain little here: with full weights, utilisation on this link is {share:.1%}")
    return lines


def _expect(plan: SyncPlan) -> list[str]:
    if not plan.evidence:
        return [f"expect    error {NOT_MEASURED} for {'; '.join(plan.unlike)}"]
    last = evidence.STEPS[1]
    lines = []
    for one in plan.evidence:
        (low, high), (fewer, more), (least, most) = one.bytes_off, one.density_off, map(size, _expected(one, plan))
        lines.append(
            f"expect    {least} to {most} a sync of history for a {one.kind} model: forecasts for {one.runs} runs of "
            f"{one.models} such models of {one.sizes[0]:,} to {one.sizes[1]:,} weights, no constant fitted to them, "
            f"were {low:+.0%} to {high:+.0%} off in bytes and {fewer:+.0%} to {more:+.0%} in changes"
        )
    return [
        *lines,
        f"          over the first {last} steps, where the forecast is {size(plan.early_bytes)} a sync; for later "
        f"steps the error is {NOT_MEASURED}",
    ]


def _codec(plan: SyncPlan) -> str:
    took = ", ".join(f"{codec} {seconds:,.2f} s" for codec, seconds in plan.took.items())
    name = "auto, which is history" if plan.best == "history" else plan.best
    return (
        f"{name}: the fewest bytes among the codecs that are quickest or take under {LITTLE:.0%} of a step, including "
        f"encoding and decoding on {plan.cores} cores at each end ({took}); set the number of cores with --cores"
    )


def rate(bits: float) -> str:
    """Format bits per second for people: 1.2 gbit/s."""
    power = min(max(0, (len(str(round(bits))) - 1) // 3), 4)
    return f"{bits / 1000**power:.3g} {['', 'k', 'm', 'g', 't'][power]}bit/s"
