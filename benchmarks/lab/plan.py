"""How accurate is `pulse plan`: predicted bytes a sync, compared with those of real training runs?

    python -m benchmarks plan --trace DIR --gguf FILE                     # half a minute (see recording.py)
    python benchmarks/plan_runs.py --out RUNS.jsonl --jobs 2                    # trains; some minutes
    python -m benchmarks plan --heldout RUNS.jsonl                        # half a minute

The forecast gets only what `pulse plan` gets on the command line: how many of the initial weights have which exponent,
the number of tensors, the learning rate and the betas; it sees nothing of the run. It is compared, first, with the
recorded run: each of its steps is published as the next version of one run with the default codec, and all bytes that
the version adds to the store are counted; second, with the three runs in results/smollm2_h200_2026-11-15.md, whose
initial weights come from the GGUF file; third, with the published densities of Qwen2.5-1.5B, trained without master
weights, for which a normal distribution of the weights is assumed.

With --heldout, forecasts are compared with the runs of plan_runs.py, on which no constant was fitted. The script fails
if `evidence.MEASURED`, which `pulse plan` quotes, differs from what these runs give.
"""

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from benchmarks.harness import recording

from pulsesync_lab.study.predict.evidence import MEASURED, Evidence
from pulsesync_lab.study.predict.forecast import Forecast, TrainingSettings, forecast
from pulsesync_lab.study.predict.models import classes_of, normal_classes
from pulsesync.publish.publisher import Publisher
from pulsesync.store import MemoryStore

TENSORS = 272
TRAINED = Path(__file__).parent / "results" / "data" / "smollm2_h200_2026-11-15.json"
FITTED = {"recorded 3e-06": "NOISE, EPSILON", "3e-06": "nothing; prompts as in the recorded run", "1e-05": "FADE"}
# Mean share of weights that change over k steps, in 400 steps; Qwen2.5-1.5B without masters, by learning rate.
PUBLISHED = {
    5e-7: {1: 0.00197, 2: 0.00209, 4: 0.00225, 8: 0.00245, 16: 0.00272, 32: 0.00304},
    1e-6: {1: 0.00266, 2: 0.00292, 4: 0.00324, 8: 0.00365, 16: 0.00417, 32: 0.00475},
    3e-6: {1: 0.00574, 2: 0.00658, 4: 0.00765, 8: 0.00899, 16: 0.01061, 32: 0.01232},
    5e-6: {1: 0.00942, 2: 0.01093, 4: 0.01288, 8: 0.01531, 16: 0.01818, 32: 0.02137},
}


def histogram(tensors: Sequence[recording.Bits]) -> dict[int, int]:
    total = sum(np.bincount(classes_of(bits.reshape(-1).view(ml_dtypes.bfloat16)), minlength=256) for bits in tensors)
    return {c: int(total[c]) for c in np.flatnonzero(total)}


def publish_recorded(run: recording.RecordedRun) -> tuple[dict[int, int], list[float], list[int]]:
    """The histogram of the initial weights; and of each step, the changed share and the bytes that its version adds."""
    first: dict[int, int] = {}
    changed, sent = [], []
    with Publisher(MemoryStore(), anchor_every=1e9) as publisher:
        for step, old, new in run.steps():
            if not first:
                first = histogram(list(old.values()))
                publisher.publish({name: bits.view(ml_dtypes.bfloat16) for name, bits in old.items()})
            report = publisher.publish({name: bits.view(ml_dtypes.bfloat16) for name, bits in new.items()}, step=step)
            changed.append(report.density)
            sent.append(report.payload_bytes)
    return first, changed, sent


def compare(name: str, told: Forecast, changed: Sequence[float], sent: Sequence[int]) -> dict[str, Any]:
    densities, sizes = [sync.density for sync in told.syncs], [sync.sizes["history"] for sync in told.syncs]
    singly = [abs(a / b - 1) for a, b in zip(sizes, sent, strict=True)]
    return {
        "run": name,
        "steps": len(sent),
        "fitted": FITTED.get(name, "nothing"),
        "changed": statistics.mean(changed),
        "predicted_changed": statistics.mean(densities),
        "bytes": statistics.mean(sent),
        "predicted_bytes": statistics.mean(sizes),
        "error": statistics.mean(sizes) / statistics.mean(sent) - 1,
        "mean_step_error": statistics.mean(singly),
        "worst_step_error": max(singly),
        "by_step": [list(sent), sizes],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| run | steps | constants fitted on it | changed, measured / predicted | bytes a sync, measured / predicted "
        "| error of the mean | error of a single sync, mean / most |"
    )
    print("|---|--:|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['run']} | {row['steps']} | {row['fitted']} "
            f"| {row['changed']:.2%} / {row['predicted_changed']:.2%} "
            f"| {row['bytes']:,.0f} / {row['predicted_bytes']:,.0f} | {row['error']:+.1%} "
            f"| {row['mean_step_error']:.1%} / {row['worst_step_error']:.1%} |"
        )


def show_steps(row: dict[str, Any]) -> None:
    print("| step | measured | predicted | error |\n|--:|--:|--:|--:|")
    for step, (real, told) in enumerate(zip(*row["by_step"], strict=True)):
        print(f"| {step} | {real:,} | {told:,} | {told / real - 1:+.1%} |")


def show_published() -> dict[str, dict[int, float]]:
    print("| learning rate | " + " | ".join(f"k = {k}" for k in PUBLISHED[1e-6]) + " |")
    print("|---|" + "--:|" * len(PUBLISHED[1e-6]))
    out = {}
    for lr, measured in PUBLISHED.items():
        told = forecast(
            normal_classes(0.02, 1_543_714_304), 338, TrainingSettings(lr, warm_up=20, masters=False)
        ).windows
        print(f"| {lr:g} | " + " | ".join(f"{measured[k]:.2%} / {told[k]:.2%}" for k in measured) + " |")
        out[f"{lr:g}"] = told
    return out


# Runs on which no constant was fitted


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """A measured run and its forecast: means over all steps, means over the last third, and the errors of both."""
    run, changed, sent = line["run"], line["changed"], line["sent"]
    # Other optimizers have no forecast of their own: that of Adam shows how wrong it is for them.
    optimizer = run["optimizer"] if run["optimizer"] in ("adamw", "lion") else "adamw"
    training = TrainingSettings(run["lr"], tuple(run["betas"]), masters=run["masters"], optimizer=optimizer)
    weights = {int(c): count for c, count in line["weights_by_class"].items()}
    told = forecast(weights, line["tensors"], training, steps=len(sent))
    late = len(sent) - max(3, len(sent) // 3)
    out = {**run, "weights": sum(weights.values()), "steps": len(sent)}
    for when, begin in (("", 0), ("late_", late)):
        mean = told.mean(begin)
        out |= {
            f"{when}changed": statistics.mean(changed[begin:]),
            f"{when}predicted_changed": mean.density,
            f"{when}bytes": statistics.mean(sent[begin:]),
            f"{when}predicted_bytes": mean.sizes["history"],
        }
        for what in ("changed", "bytes"):
            out[f"{when}{what}_off"] = out[f"{when}predicted_{what}"] / out[f"{when}{what}"] - 1
    return out


def show_heldout(rows: Sequence[dict[str, Any]]) -> None:
    print(
        "| model | weights | optimizer | rate | steps | changed, measured / predicted | off | in the last third "
        "| bytes a sync, measured / predicted | off | in the last third |"
    )
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in rows:
        how = f"{row['optimizer']} {row['betas'][0]:g}, {row['betas'][1]:g}" + (
            "" if row["masters"] else ", no masters"
        )
        print(
            f"| {row['name']} | {row['weights']:,} | {how} | {row['lr']:g} | {row['steps']} "
            f"| {row['changed']:.2%} / {row['predicted_changed']:.2%} | {row['changed_off']:+.0%} "
            f"| {row['late_changed_off']:+.0%} | {row['bytes']:,.0f} / {row['predicted_bytes']:,.0f} "
            f"| {row['bytes_off']:+.0%} | {row['late_bytes_off']:+.0%} |"
        )


def evidence_of(rows: Sequence[dict[str, Any]]) -> dict[Any, tuple[Evidence, ...]]:
    """The table that `pulse plan` quotes: errors rounded outwards to whole per cents."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if row["optimizer"] in ("adamw", "lion") and row["counted"]:
            key = row["optimizer"], tuple(row["betas"]), row["masters"], "trained" if row["trained"] else "random"
            groups.setdefault(key, []).append(row)
    found: dict[Any, tuple[Evidence, ...]] = {}
    for (*key, kind), some in sorted(groups.items(), key=str, reverse=True):
        sides = [_outwards([row[what] for row in some]) for what in ("bytes_off", "changed_off")]
        rates, weights = [row["lr"] for row in some], [row["weights"] for row in some]
        spans = (min(rates), max(rates)), (min(weights), max(weights))
        one = Evidence(kind, len(some), len({row["name"] for row in some}), *spans, *sides)
        found[tuple(key)] = (*found.get(tuple(key), ()), one)
    return found


def _outwards(errors: Sequence[float]) -> tuple[float, float]:
    return math.floor(100 * min(errors)) / 100, math.ceil(100 * max(errors)) / 100


def report_heldout(path: Path) -> None:
    rows = [judge(json.loads(line)) for line in path.read_text().splitlines()]
    show_heldout(rows)
    found = evidence_of(rows)
    print("\n" + "\n".join(f"    {key!r}: {value!r}," for key, value in found.items()))
    print("\n" + json.dumps({"bench": "plan heldout", "runs": rows, "versions": versions()}))
    if found != MEASURED:
        raise SystemExit("evidence.MEASURED differs from what these runs give: replace it by the table above")


def versions() -> dict[str, str]:
    return {name: version(name) for name in ("pulsesync", "numpy", "numba")} | {"python": platform.python_version()}


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser, required=False)
    parser.add_argument("--heldout", type=Path, help="the file that plan_runs.py wrote")


def main(given: argparse.Namespace) -> None:
    if given.heldout:
        report_heldout(given.heldout)
        return
    if not given.trace:
        parser.error("give --heldout, or --trace")
    start, changed, sent = publish_recorded(recording.load(given.trace, given.gguf))
    began = time.perf_counter()
    told = forecast(start, TENSORS, TrainingSettings(3e-6), steps=len(sent))
    rows = [compare("recorded 3e-06", told, changed, sent)]
    if given.gguf:
        dequantised = recording.read_gguf(Path(given.gguf)).values()
        weights = histogram([recording.round_to_bf16(values) for values in dequantised])
        trained = json.loads(TRAINED.read_text())["runs"]
        for lr, run in trained.items():
            began = time.perf_counter()
            told = forecast(weights, TENSORS, TrainingSettings(float(lr)), steps=len(run["bytes"]))
            rows.append(compare(lr, told, run["changed"], run["bytes"]))
    seconds = time.perf_counter() - began
    show(rows)
    print(
        f"\nA forecast of {rows[-1]['steps']} steps took {seconds:.2f} s.\n\nThe recorded run, bytes of each version:\n"
    )
    show_steps(rows[0])
    print("\nQwen2.5-1.5B without masters, warm-up 20: share that changes over k steps, published / predicted\n")
    published = show_published()
    print("\n" + json.dumps({"bench": "plan", "runs": rows, "published": published, "versions": versions()}))
