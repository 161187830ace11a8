"""Does the recorder count what the log of a recorded run says, and how close are predicted bytes to real ones?

    python -m benchmarks trace --trace DIR --gguf FILE --out study

Feeds the 15 steps of the recorded GRPO run to a Recorder, compares its counts with the log that was written during
training, makes every patch with every codec, and prints its bytes next to the predicted ones. With --out, the recording
and the report are written there.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import recording as trace
from benchmarks.harness.needs import MissingError
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.weights import as_bf16
from pulsesync_lab.study.recorder import Recorder
from pulsesync_lab.study.recording import Recording, Step
from pulsesync_lab.study.report import findings
from pulsesync_lab.study.report.page import write_report

QUICK = ("--steps", "2")
FACTS = {"model": "SmolLM2-135M-Instruct", "algorithm": "GRPO", "optimizer": "AdamW", "betas": [0.9, 0.999], "lr": 3e-6}
TITLE = "SmolLM2-135M-Instruct, GRPO at 3e-6"


def read_log(path: Path) -> list[dict[str, Any]]:
    log: list[dict[str, Any]] = trace.Part.read(path).header["log"]
    return log


def record(run: trace.RecordedRun, log: Sequence[dict[str, Any]], steps: int, encode_every: int) -> Recording:
    """Record the run. The recorder gets BF16 weights; `masters` states that they were rounded from FP32."""
    recorder = Recorder(contrast=(), sample=1 << 20, encode_every=encode_every, facts={**FACTS, "masters": "F32"})
    for step, old, new in run.steps():
        if step == 0:
            recorder.feed(as_bf16(old), -1)
        elif step == steps:
            break
        recorder.feed(as_bf16(new), step, reward=log[step]["reward"])
    return recorder.close()


def densities(recorded: Recording, log: Sequence[dict[str, Any]]) -> str:
    """A table of the recorder's counts and those of the log. Raises: AssertionError, if they differ."""
    rows = []
    for step, told in zip(recorded.steps, log, strict=False):
        assert (step.step, step.all_changed) == (told["step"], told["changed"]), (
            "the recorder's count of changed weights differs from the log"
        )
        again = "" if not step.step else f"{step.again / step.all_changed:.1%}"
        same = "" if not step.again else f"{step.same_way / step.again:.1%}"
        rows.append(
            [
                f"{step.step}",
                f"{told['density']:.4%}",
                f"{step.all_changed / recorded.size:.4%}",
                f"{told['changed']:,}",
                f"{step.all_changed:,}",
                f"{told['one_ulp']:.2%}",
                f"{step.units.get(1, 0) / step.all_changed:.2%}",
                again,
                same,
                f"{step.hot or 0:.2%}",
            ]
        )
    head = ["step", "log: density", "recorder", "log: changed", "recorder", "log: by one unit", "recorder"]
    return table([*head, "changed a step before", "the same way", "hot"], rows)


def windows(recorded: Recording) -> str:
    rows = []
    for k in recorded.header.windows:
        values = [value for _, value in findings.window_sparsity(recorded, k)]
        if values:
            rows.append([f"{k}", f"{len(values)}", *(f"{v:.3%}" for v in (sum(values) / len(values), min(values)))])
    return table(["k", "windows", "unchanged, mean", "lowest"], rows)


def sizes(recorded: Recording) -> str:
    codecs = [codec for codec in ("plain", "gap", "context", "history") if codec in recorded.steps[0].sizes]
    rows = []
    for step in recorded.steps:
        row = [f"{step.step}"]
        for codec in codecs:
            row += [f"{step.sizes[codec].predicted:,}", real(step, codec), off(step, codec)]
        rows.append(row)
    total = ["all"]
    for codec in codecs:
        error = findings.prediction_error(recorded, codec)
        total += ["", "", "" if error is None else f"{error:+.1%}"]
    return table(
        ["step", *(f"{codec}{what}" for codec in codecs for what in (" predicted", ", real", ", off"))], [*rows, total]
    )


def real(step: Step, codec: str) -> str:
    size = step.sizes[codec].real
    return "" if size is None else f"{size:,}"


def off(step: Step, codec: str) -> str:
    size = step.sizes[codec]
    return "" if size.real is None else f"{(size.predicted or 0) / size.real - 1:+.1%}"


def facts(recorded: Recording, log: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "weights": recorded.size,
        "changed": [step.all_changed for step in recorded.steps],
        "logged": [told["changed"] for told in log[: len(recorded.steps)]],
        "seconds": [step.seconds for step in recorded.steps],
        "bytes": [{codec: [s.predicted, s.real] for codec, s in step.sizes.items()} for step in recorded.steps],
        "error": {codec: findings.prediction_error(recorded, codec) for codec in recorded.steps[0].sizes},
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    trace.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for the recording and the report")
    parser.add_argument("--no-patches", action="store_true", help="make no patches: predictions alone")


def main(given: argparse.Namespace) -> None:
    if not given.trace:
        raise MissingError("a whole recording of a run: give --trace")
    run = trace.load(given.trace, given.gguf)
    log = [entry for path in sorted(Path(given.trace).glob("grpo-lr3e-6.part*")) for entry in read_log(path)]
    began = time.perf_counter()
    recorded = record(run, log, given.steps, encode_every=0 if given.no_patches else 1)
    taken = time.perf_counter() - began
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        recorded.write(given.out / "trace.jsonl")
        write_report(recorded, given.out / "trace.html", TITLE)
    print(densities(recorded, log), end="\n\n")
    print(windows(recorded), end="\n\n")
    print(sizes(recorded), end="\n\n")
    print(f"{len(recorded.steps)} steps in {taken:.0f} s, patches included.\n")
    print(json_line({"bench": "study_trace", **provenance(), **facts(recorded, log)}))
