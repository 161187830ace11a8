"""How accurate is `pulse plan`: predicted bytes a sync, compared with those of real training runs?

    python -m benchmarks plan --trace DIR --gguf FILE                     # half a minute (see recording.py)
    python -m benchmarks plan --train RUNS.jsonl --jobs 2                       # trains; some minutes
    python -m benchmarks plan --heldout RUNS.jsonl                        # half a minute

The forecast gets only what `pulse plan` gets on the command line: how many of the initial weights have which exponent,
the number of tensors, the learning rate and the betas; it sees nothing of the run. It is compared, first, with the
recorded run: each of its steps is published as the next version of one run with the default codec, and all bytes that
the version adds to the store are counted; second, with the three runs in results/smollm2_h200_2026-11-15.md, whose
initial weights come from the GGUF file; third, with the published densities of Qwen2.5-1.5B, trained without master
weights, for which a normal distribution of the weights is assumed.

With --heldout, forecasts are compared with the runs of runs.py, on which no constant was fitted. It fails
if `evidence.MEASURED`, which `pulse plan` quotes, differs from what these runs give.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import recording
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.save import RESULTS
from benchmarks.harness.timing import timed
from benchmarks.harness.weights import as_bf16
from benchmarks.lab import runs
from pulsesync.publish.publisher import Publisher
from pulsesync.store import MemoryStore
from pulsesync_lab.study.predict.evidence import MEASURED, Evidence
from pulsesync_lab.study.predict.forecast import Forecast, TrainingSettings, forecast
from pulsesync_lab.study.predict.models import normal_classes

QUICK = ("--heldout", "few")
TENSORS = 272
TRAINED = RESULTS / "data" / "smollm2_h200_2026-11-15.json"
FITTED = {"recorded 3e-06": "NOISE, EPSILON", "3e-06": "nothing; prompts as in the recorded run", "1e-05": "FADE"}
# Mean share of weights that change over k steps, in 400 steps; Qwen2.5-1.5B without masters, by learning rate.
PUBLISHED = {
    5e-7: {1: 0.00197, 2: 0.00209, 4: 0.00225, 8: 0.00245, 16: 0.00272, 32: 0.00304},
    1e-6: {1: 0.00266, 2: 0.00292, 4: 0.00324, 8: 0.00365, 16: 0.00417, 32: 0.00475},
    3e-6: {1: 0.00574, 2: 0.00658, 4: 0.00765, 8: 0.00899, 16: 0.01061, 32: 0.01232},
    5e-6: {1: 0.00942, 2: 0.01093, 4: 0.01288, 8: 0.01531, 16: 0.01818, 32: 0.02137},
}


def histogram(tensors: Sequence[recording.Bits]) -> dict[int, int]:
    return runs.histogram(as_bf16({str(n): bits for n, bits in enumerate(tensors)}).values())


def publish_recorded(run: recording.RecordedRun) -> tuple[dict[int, int], list[float], list[int]]:
    """The histogram of the initial weights; and of each step, the changed share and the bytes that its version adds."""
    first: dict[int, int] = {}
    changed, sent = [], []
    with Publisher(MemoryStore(), anchor_every=1e9) as publisher:
        for step, old, new in run.steps():
            if not first:
                first = histogram(list(old.values()))
                publisher.publish(as_bf16(old))
            report = publisher.publish(as_bf16(new), step=step)
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
    cells = [
        [
            row["run"],
            str(row["steps"]),
            row["fitted"],
            f"{row['changed']:.2%} / {row['predicted_changed']:.2%}",
            f"{row['bytes']:,.0f} / {row['predicted_bytes']:,.0f}",
            f"{row['error']:+.1%}",
            f"{row['mean_step_error']:.1%} / {row['worst_step_error']:.1%}",
        ]
        for row in rows
    ]
    head = ["run", "steps", "constants fitted on it", "changed, measured / predicted"]
    head += ["bytes a sync, measured / predicted", "error of the mean", "error of a single sync, mean / most"]
    print(table(head, cells))


def show_steps(row: dict[str, Any]) -> None:
    steps = enumerate(zip(*row["by_step"], strict=True))
    cells = [[str(step), f"{real:,}", f"{told:,}", f"{told / real - 1:+.1%}"] for step, (real, told) in steps]
    print(table(["step", "measured", "predicted", "error"], cells))


def show_published() -> dict[str, dict[int, float]]:
    cells, out = [], {}
    for lr, measured in PUBLISHED.items():
        training = TrainingSettings(lr, warm_up=20, masters=False)
        told = forecast(normal_classes(0.02, 1_543_714_304), 338, training).windows
        cells.append([f"{lr:g}", *(f"{measured[k]:.2%} / {told[k]:.2%}" for k in measured)])
        out[f"{lr:g}"] = told
    print(table(["learning rate", *(f"k = {k}" for k in PUBLISHED[1e-6])], cells))
    return out


# Runs on which no constant was fitted


def judge(line: dict[str, Any]) -> dict[str, Any]:
    """A measured run and its forecast: means over all steps, means over the last third, and the errors of both."""
    run, changed, sent = line["run"], line["changed"], line["sent"]
    # Other optimizers have no forecast of their own: that of Adam shows how wrong it is for them.
    optimizer: Literal["adamw", "lion"] = "lion" if run["optimizer"] == "lion" else "adamw"
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
    cells = [
        [
            row["name"],
            f"{row['weights']:,}",
            f"{row['optimizer']} {row['betas'][0]:g}, {row['betas'][1]:g}{'' if row['masters'] else ', no masters'}",
            f"{row['lr']:g}",
            str(row["steps"]),
            f"{row['changed']:.2%} / {row['predicted_changed']:.2%}",
            f"{row['changed_off']:+.0%}",
            f"{row['late_changed_off']:+.0%}",
            f"{row['bytes']:,.0f} / {row['predicted_bytes']:,.0f}",
            f"{row['bytes_off']:+.0%}",
            f"{row['late_bytes_off']:+.0%}",
        ]
        for row in rows
    ]
    head = ["model", "weights", "optimizer", "rate", "steps", "changed, measured / predicted", "off"]
    head += ["in the last third", "bytes a sync, measured / predicted", "off", "in the last third"]
    print(table(head, cells))


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
    print("\n" + json_line({"bench": "plan heldout", "runs": rows, **provenance("torch")}))
    if found != MEASURED:
        raise SystemExit("evidence.MEASURED differs from what these runs give: replace it by the table above")


def judge_few() -> None:
    """Train the two shortest runs and compare them with their forecasts; fail if a forecast is out by a factor of 2."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs.jsonl"
        runs.train_all(runs.SHORT, file)
        rows = [judge(json.loads(line)) for line in file.read_text().splitlines()]
    show_heldout(rows)
    assert all(-0.5 < row["bytes_off"] < 1 for row in rows), "a forecast is out by more than a factor of two"
    print("\n" + json_line({"bench": "plan heldout", "runs": rows, **provenance("torch")}))


def arguments(parser: argparse.ArgumentParser) -> None:
    recording.add_arguments(parser)
    parser.add_argument("--heldout", metavar="FILE", help="the file that --train wrote; few: train two short runs now")
    parser.add_argument("--train", type=Path, metavar="FILE", help="train the held-out runs: a JSON line for each")
    parser.add_argument("--jobs", type=int, default=1, help="processes of --train, with one thread each")


def main(given: argparse.Namespace) -> None:
    if given.train:
        runs.train_held_out(given.train, given.jobs)
    elif given.trace:
        report_recorded(given.trace, given.gguf)
    elif given.heldout == "few":
        judge_few()
    elif given.heldout:
        report_heldout(Path(given.heldout))
    else:
        raise SystemExit("give --heldout, --train or --trace")


def report_recorded(trace: str, gguf: str | None) -> None:
    start, changed, sent = publish_recorded(recording.load(trace, gguf))
    told, seconds = timed(partial(forecast, start, TENSORS, TrainingSettings(3e-6), steps=len(sent)))
    rows = [compare("recorded 3e-06", told, changed, sent)]
    if gguf:
        dequantised = recording.read_gguf(Path(gguf)).values()
        weights = histogram([recording.round_to_bf16(values) for values in dequantised])
        for lr, run in json.loads(TRAINED.read_text())["runs"].items():
            training = TrainingSettings(float(lr))
            told, seconds = timed(partial(forecast, weights, TENSORS, training, steps=len(run["bytes"])))
            rows.append(compare(lr, told, run["changed"], run["bytes"]))
    show(rows)
    print(
        f"\nA forecast of {rows[-1]['steps']} steps took {seconds:.2f} s.\n\nThe recorded run, bytes of each version:\n"
    )
    show_steps(rows[0])
    print("\nQwen2.5-1.5B without masters, warm-up 20: share that changes over k steps, published / predicted\n")
    published = show_published()
    print("\n" + json_line({"bench": "plan", "runs": rows, "published": published, **provenance("torch")}))
