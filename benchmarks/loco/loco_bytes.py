"""How many bytes do trainers exchange? DDP, DiLoCo, PULSELoCo, and PULSELoCo with compact values, on real GRPO.

    python -m benchmarks loco_bytes                                # the demo's policy, a few settings, on a CPU
    python -m benchmarks loco_bytes --grid --jobs 16               # all of H, R and learning rates
    python -m benchmarks loco_bytes --model .models/smollm2 --device cuda --lr 1e-6 --every 8 --trainers 4

Each trainer has its own momentum, as in PulseLoCo. Training continues from the updates of the exact gate, or with
--follow compact from those of the compact one. In the rounds that are measured, the same updates are also encoded by
the other gate and exchanged by both methods of a process group, `owner` and `gather`, and every trainer's result is
compared bit for bit. The payload is what one trainer has to send, headers and hashes included; the wire is all that it
sends in a round, sizes and control messages included. Baselines: FP32 DiLoCo, 4 bytes a weight, by a ring all-reduce;
DDP, the same at each of H steps (BF16: half).
"""

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.harness.processes import last_line
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.loco import fleet as fleets
from benchmarks.loco.fleet import Fleet, dense_bytes, measure
from pulsesync.loco.gate import SentUpdate, VisibilityGate
from pulsesync.loco.outer_step import Nesterov, OwnMomentum
from pulsesync_lab.demo.game import open_game
from pulsesync_lab.demo.settings import DemoSettings

QUICK = ("--lr", "1e-4", "--every", "1", "--trainers", "2", "--rounds", "4", "--prompts", "4", "--group", "8")
GATES = {"exact": VisibilityGate(), "compact": VisibilityGate(1)}
EVERY, TRAINERS, RATES = (1, 4, 8, 16, 32), (2, 4, 8), (1e-6, 3e-6, 1e-5, 1e-4)
FIRST = 3  # rounds that are shown separately: a checkpoint begins on the BF16 grid, where fewer entries are sent


def run(given: argparse.Namespace) -> dict[str, Any]:
    """One setting: the bytes of every round that is measured."""
    torch.set_num_threads(1 if given.device == "cpu" else 8)
    game = open_game(DemoSettings(model=given.model, device=given.device, group=given.group))
    fleet = Fleet(game, OwnMomentum(Nesterov(0.7, 0.9)), seed=given.seed, **fleets.settings(given))
    rounds: list[dict[str, Any]] = []
    for number in range(1, given.rounds + 1):
        parts: dict[str, list[SentUpdate]] = {mode: [] for mode in GATES}
        for _, update in fleet.work():
            for mode, gate in GATES.items():
                parts[mode].append(gate.select(fleet.shared.theta, update))
            fleet.take(update, parts[given.follow][-1])
        found: dict[str, Any] = {"round": number, "reward": fleet.rewards[-1]}
        if number == 1 or number > FIRST:
            found |= {mode: asdict(measure(fleet, some)) for mode, some in parts.items()}
        if given.say:
            print(json_line(found), file=sys.stderr, flush=True)
        rounds.append(found)
        fleet.step()
    keys = ("model", "every", "trainers", "lr", "prompts", "group", "seed", "follow")
    setting = {key: getattr(given, key) for key in keys}
    return {**setting, "model": os.path.basename(given.model), "size": fleet.shared.theta.size, "rounds": rounds}


def ratios(found: dict[str, Any], mode: str, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """How many times fewer bytes than dense, as means over rounds."""
    payload, ring = dense_bytes(found["size"], found["trainers"])
    some = [entry[mode] for entry in rounds if mode in entry]

    def mean(get: Any) -> float:
        return float(sum(map(get, some)) / len(some))

    return {
        "sent": mean(lambda r: r["share"]),
        "union": mean(lambda r: r["union"]),
        "bits": 8 * mean(lambda r: r["payload"]) / max(1.0, found["size"] * mean(lambda r: r["share"])),
        "payload": payload / mean(lambda r: r["payload"]),
        "owner": ring / mean(lambda r: r["wire"]["owner"][0]),
        "gather": ring / mean(lambda r: r["wire"]["gather"][0]),
    }


HEAD = [
    "lr, H, R, mode", "sent, round 1", "sent", "union", "bits an entry", "payload × (round 1)", "payload ×",
    "wire ×, owner", "wire ×, gather", "payload × under DDP", "wire × under DDP, owner",
]  # fmt: skip


def rows(found: dict[str, Any]) -> list[list[str]]:
    out, every = [], found["every"]
    for mode in ("exact", "compact"):
        first = ratios(found, mode, [entry for entry in found["rounds"] if entry["round"] == 1])
        steady = ratios(found, mode, [entry for entry in found["rounds"] if entry["round"] > FIRST])
        shares = [f"{share:.2%}" for share in (first["sent"], steady["sent"], steady["union"])]
        times = (first["payload"], steady["payload"], steady["owner"], steady["gather"])
        under_ddp = [f"{every * steady[what]:.0f}" for what in ("payload", "owner")]
        name = f"{found['lr']:g}, {every}, {found['trainers']}, {mode}"
        out.append([name, *shares, f"{steady['bits']:.2f}", *(f"{one:.1f}" for one in times), *under_ddp])
    return out


def arguments(parser: argparse.ArgumentParser) -> None:
    fleets.arguments(parser, lr=1e-6, rounds=6)
    parser.add_argument("--seed", type=int, default=0)
    gates = "gate whose updates are applied"
    parser.add_argument("--follow", choices=["exact", "compact"], default="exact", help=gates)
    parser.add_argument("--grid", action="store_true", help="all settings, each in a process of its own")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="run one setting; print JSON only")


def main(given: argparse.Namespace) -> None:
    if given.json:
        print(json.dumps(run(given)))
        return

    def one(setting: tuple[float, int, int]) -> dict[str, Any]:
        """One setting of the grid, in a process of its own."""
        options = ["--json"]
        for name, value in zip(("lr", "every", "trainers"), setting, strict=True):
            options += [f"--{name}", str(value)]
        for name in ("model", "device", "rounds", "prompts", "group", "seed", "follow"):
            options += [f"--{name}", str(getattr(given, name))]
        found: dict[str, Any] = last_line("benchmarks", "loco_bytes", *options)
        return found

    if given.grid:
        settings = [(lr, h, r) for lr in RATES for h in EVERY for r in TRAINERS]
        longest_first = sorted(settings, key=lambda s: -s[1] * s[2])
        with ThreadPoolExecutor(given.jobs) as pool:
            by_setting = dict(zip(longest_first, pool.map(one, longest_first), strict=True))
        found = [by_setting[setting] for setting in settings]
    else:
        found = [run(given)]
    print(table(HEAD, [row for setting in found for row in rows(setting)]) + "\n")
    print(json_line({"bench": "loco", **provenance(), "settings": found}))
