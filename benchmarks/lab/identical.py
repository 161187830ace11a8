"""Is a run that is synchronised by patches the same run, bit for bit, as one by full weights?

    python benchmarks/bench_identical.py [--steps 30] [--plot FILE]

The RL run of `pulse demo` in lock-step, twice with the same seed: weights, rewards and rollouts of every step are
compared by SHA-256, and results are printed only if all are equal. The plot shows both reward curves.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.report import provenance

from pulsesync_lab.charts import Panel, draw
from pulsesync_lab.demo.run import DemoRun
from pulsesync_lab.demo.settings import DemoSettings

SAME = ("reward", "loss", "weights_sha256", "rollouts_sha256")


def run(sync: Literal["full", "pulse"], steps: int) -> list[dict[str, Any]]:
    settings = DemoSettings(steps=steps, delay=0, sync=sync)
    with tempfile.TemporaryDirectory() as folder, DemoRun(Path(folder), settings) as going:
        return list(going.lines())


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--plot", type=Path)


def main(given: argparse.Namespace) -> None:
    full, patches = run("full", given.steps), run("pulse", given.steps)
    for whole, by_patch in zip(full, patches, strict=True):
        for key in SAME:
            assert whole[key] == by_patch[key], f"step {whole['step']}: {key} differs"
    sizes = [sum(line["size_bytes"] for line in lines) for lines in (full, patches)]
    print(f"{len(full)} steps in lock-step: weights, rewards, losses and rollouts equal at every one.")
    print(f"Bytes: {sizes[0]:,} by full weights, {sizes[1]:,} by patches, {sizes[0] / sizes[1]:.1f} times fewer.")
    print(
        json.dumps(
            {
                "bench": "identical",
                **provenance("torch"),
                "steps": len(full),
                "full_bytes": sizes[0],
                "pulse_bytes": sizes[1],
                "reward": [line["reward"] for line in full],
                "last_weights_sha256": full[-1]["weights_sha256"],
            }
        )
    )
    if given.plot:
        both = {"full": full, "pulse": patches}
        curves = {name: [(line["step"], line["reward"]) for line in lines] for name, lines in both.items()}
        title = "One run by full weights, and the same by patches"
        given.plot.write_text(draw([Panel("Reward, in lock-step", curves)], title))
