"""Is an RL run by patches the same as by full weights, bit for bit, and how busy are its workers on a narrow link?

    python -m benchmarks demo                                            # all three parts
    python -m benchmarks demo --parts identical --steps 30 --plot FILE
    python -m benchmarks demo --parts links delays --steps 10 --plot FILE

The RL run of `pulse demo`: one trainer, two workers, a policy of 1.2 million weights. Parts:

- identical: the run in lock-step, twice with the same seed. Weights, rewards and rollouts of every step are compared by
  SHA-256, and results are printed only if all are equal. The plot shows both reward curves.
- links: once with full weights at every sync and once with patches, over links of several speeds (each worker reads
  through a ThrottledStore). Shares are of the time after the first two steps. PULSE's figure 1 has the same axes,
  utilisation against bandwidth, and so has the plot.
- delays: how delay and publishing every k steps affect reward and sparsity; three times as many steps.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.report import json_line, provenance, table
from pulsesync_lab.charts import Panel
from pulsesync_lab.charts import draw as draw_panels
from pulsesync_lab.demo.run import DemoRun
from pulsesync_lab.demo.settings import DemoSettings

QUICK = ("--steps", "3", "--parts", "identical", "links", "--links", "100")
PARTS = ("identical", "links", "delays")
SAME = ("reward", "loss", "weights_sha256", "rollouts_sha256")
SYNCS = ("full", "pulse")
LINKS = (100, 50, 20, 10, 5)  # Mbit/s
DELAYS = ((0, 1), (1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (1, 8))  # steps of delay, and in a version
SKIPPED = 2  # steps, in which processes start
Lines = list[dict[str, Any]]


def run(**settings: Any) -> Lines:
    """Run the demo; return its line for every step."""
    with tempfile.TemporaryDirectory() as folder, DemoRun(Path(folder), DemoSettings(**settings)) as going:
        return list(going.lines())


# -- the same run --------------------------------------------------------------------------------------------------


def identical(steps: int, plot: Path | None) -> dict[str, Any]:
    full, patches = (run(steps=steps, delay=0, sync=sync) for sync in SYNCS)
    for whole, by_patch in zip(full, patches, strict=True):
        for key in SAME:
            assert whole[key] == by_patch[key], f"step {whole['step']}: {key} differs"
    sizes = [sum(line["size_bytes"] for line in lines) for lines in (full, patches)]
    print(f"{len(full)} steps in lock-step: weights, rewards, losses and rollouts equal at every one.")
    print(f"Bytes: {sizes[0]:,} by full weights, {sizes[1]:,} by patches, {sizes[0] / sizes[1]:.1f} times fewer.\n")
    if plot:
        both = zip(SYNCS, (full, patches), strict=True)
        curves = {name: [(line["step"], line["reward"]) for line in lines] for name, lines in both}
        title = "One run by full weights, and the same by patches"
        plot.write_text(draw_panels([Panel("Reward, in lock-step", curves)], title))
    rewards = [line["reward"] for line in full]
    last = full[-1]["weights_sha256"]
    return {"steps": len(full), "full_bytes": sizes[0], "pulse_bytes": sizes[1], "reward": rewards, "last_sha256": last}


# -- how busy it is ------------------------------------------------------------------------------------------------


def shares(lines: Lines) -> dict[str, float]:
    """Shares of the time and means, of the steps after the first ones."""
    first, last, rest = lines[SKIPPED - 1], lines[-1], lines[SKIPPED:]
    wall = last["time"] - first["time"]
    workers = [
        (last["workers"][name]["generate_s"] - first["workers"][name]["generate_s"]) / wall
        for name in first["workers"].keys() & last["workers"].keys()
    ]
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


def over_links(steps: int, links: list[float], plot: Path | None) -> dict[str, Any]:
    found: dict[str, dict[float, dict[str, float]]] = {sync: {} for sync in SYNCS}
    rows = []
    for link in links:
        for sync in SYNCS:
            got = found[sync][link] = shares(run(steps=steps, sync=sync, link=1e6 * link / 8, delay=1))
            busy = [f"{got['step_s']:.2f}", f"{got['workers']:.0%}", f"{got['trainer']:.0%}", f"{got['bytes']:,.0f}"]
            rows.append([f"{link:g} Mbit/s, {sync}", *busy])
    print(table(["link, sync", "a step, s", "workers generate", "trainer trains", "bytes a sync"], rows) + "\n")
    if plot:
        curves = [
            Curve(f"{who}, {sync}", [(link, 100 * found[sync][link][who], True) for link in sorted(links)])
            for sync in SYNCS
            for who in ("workers", "trainer")
        ]
        ticks = {link: f"{link:g}" for link in links}
        plot.write_text(draw("At work, by bandwidth", "link, Mbit/s", "% of the time", curves, ticks))
    return {sync: {f"{link:g} Mbit/s": got for link, got in by.items()} for sync, by in found.items()}


def with_delays(steps: int) -> list[dict[str, Any]]:
    found = [
        {"delay": delay, "publish_every": every, **shares(run(steps=3 * steps, delay=delay, publish_every=every))}
        for delay, every in DELAYS
    ]
    rows = [
        [
            f"{got['delay']}, {got['publish_every']}",
            f"{got['reward']:.3f}",
            f"{got['behind']:.2f}",
            f"{got['changed']:.1%}",
            f"{got['bytes'] / got['publish_every']:,.0f}",
        ]
        for got in found
    ]
    head = ["delay, publish every", "reward, last ten", "steps behind", "changed in a version", "bytes a step"]
    print(table(head, rows) + "\n")
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--links", type=float, nargs="+", default=list(LINKS), help="Mbit/s")
    parser.add_argument("--plot", type=Path, help="write an SVG: of links, or of the rewards of `identical` alone")


def main(given: argparse.Namespace) -> None:
    out: dict[str, Any] = {}
    if "identical" in given.parts:
        out["identical"] = identical(given.steps, None if "links" in given.parts else given.plot)
    if "links" in given.parts:
        out["links"] = over_links(given.steps, given.links, given.plot)
    if "delays" in given.parts:
        out["delays"] = with_delays(given.steps)
    print(json_line({"bench": "demo", **provenance("torch"), **out}))
