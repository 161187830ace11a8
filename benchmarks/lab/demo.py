"""What share of their time do workers generate and the trainer train, when the link between them is narrow?

    python benchmarks/bench_utilisation.py [--steps 20] [--plot FILE]

The RL run of `pulse demo` (one trainer, two workers, a policy of 1.2 million weights), once with full weights at every
sync and once with patches, over links of several speeds (each worker reads through a ThrottledStore). It also shows, on
the slowest link, how delay and publishing every k steps affect reward and sparsity. Shares are of the time after the
first two steps. PULSE's figure 1 has the same axes: utilisation against bandwidth.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.report import provenance
from benchmarks.harness.curves import Curve, draw

from pulsesync_lab.demo.run import DemoRun
from pulsesync_lab.demo.settings import DemoSettings

LINKS = {"100 Mbit/s": 100e6, "50 Mbit/s": 50e6, "20 Mbit/s": 20e6, "10 Mbit/s": 10e6, "5 Mbit/s": 5e6}
SKIPPED = 2  # steps, in which processes start


def measure(**settings: Any) -> dict[str, float]:
    """Run the demo; return shares and means."""
    with tempfile.TemporaryDirectory() as folder, DemoRun(Path(folder), DemoSettings(**settings)) as run:
        lines = list(run.lines())
    first, last = lines[SKIPPED - 1], lines[-1]
    wall = last["time"] - first["time"]
    workers = [
        (last["workers"][name]["generate_s"] - first["workers"][name]["generate_s"]) / wall
        for name in first["workers"].keys() & last["workers"].keys()
    ]
    rest = lines[SKIPPED:]
    changed = [line["changed"] / line["total"] for line in rest if line["changed"] is not None]
    return {
        "workers": sum(workers) / len(workers),
        "trainer": sum(line["train_s"] for line in rest) / wall,
        "step_s": wall / len(rest),
        "bytes": sum(line["size_bytes"] for line in rest) / len(rest),
        "behind": sum(line["behind"] for line in rest) / len(rest),
        "changed": sum(changed) / len(changed) if changed else float("nan"),
        "reward": sum(line["reward"] for line in lines[-10:]) / len(lines[-10:]),
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plot", type=Path)


def main(given: argparse.Namespace) -> None:
    found: dict[str, dict[str, dict[str, float]]] = {"full": {}, "pulse": {}}
    print("| link | sync | a step, s | workers generate | trainer trains | bytes a sync |")
    print("|---|---|--:|--:|--:|--:|")
    for link, rate in LINKS.items():
        for way in ("full", "pulse"):
            got = found[way][link] = measure(steps=given.steps, sync=way, link=rate / 8, delay=1)
            print(
                f"| {link} | {way} | {got['step_s']:.2f} | {got['workers']:.0%} | {got['trainer']:.0%} | "
                f"{got['bytes']:,.0f} |",
                flush=True,
            )
    print("\n| delay | publish every | reward, last ten | steps behind | changed in a version | bytes a step |")
    print("|--:|--:|--:|--:|--:|--:|")
    asynchrony = []
    for delay, every in ((0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (1, 8)):
        got = measure(steps=3 * given.steps, delay=delay, publish_every=every)
        asynchrony.append({"delay": delay, "publish_every": every, **got})
        print(
            f"| {delay} | {every} | {got['reward']:.3f} | {got['behind']:.2f} | {got['changed']:.1%} | "
            f"{got['bytes'] / every:,.0f} |",
            flush=True,
        )
    print()
    print(json.dumps({"bench": "utilisation", **provenance(), "links": found, "asynchrony": asynchrony}))
    if given.plot:
        curves = [
            Curve(
                f"{who}, {way}",
                [(rate / 1e6, 100 * found[way][link][who], True) for link, rate in reversed(LINKS.items())],
            )
            for way in ("full", "pulse")
            for who in ("workers", "trainer")
        ]
        ticks = {rate / 1e6: link.split()[0] for link, rate in LINKS.items()}
        given.plot.write_text(draw("At work, by bandwidth", "link, Mbit/s", "% of the time", curves, ticks))
