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
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from benchmarks.harness.report import provenance
from benchmarks.loco.fleet import Fleet, dense_bytes, measure

from pulsesync_lab.demo.game import open_game
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync.loco.gate import SentUpdate, VisibilityGate
from pulsesync.loco.outer import Nesterov, OwnMomentum

GATES = {"exact": VisibilityGate(), "compact": VisibilityGate(1)}
EVERY, TRAINERS, RATES = (1, 4, 8, 16, 32), (2, 4, 8), (1e-6, 3e-6, 1e-5, 1e-4)
FIRST = 3  # rounds that are shown separately: a checkpoint begins on the BF16 grid, where fewer entries are sent


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One setting: the bytes of every round that is measured."""
    import torch

    torch.set_num_threads(1 if options.device == "cpu" else 8)
    game = open_game(DemoSettings(model=options.model, device=options.device, group=options.group))
    fleet = Fleet(
        game,
        OwnMomentum(Nesterov(0.7, 0.9)),
        trainers=options.trainers,
        sync_every=options.every,
        lr=options.lr,
        prompts=options.prompts,
        group=options.group,
        seed=options.seed,
    )
    rounds: list[dict[str, Any]] = []
    for number in range(1, options.rounds + 1):
        parts: dict[str, list[SentUpdate]] = {mode: [] for mode in GATES}
        for _, update in fleet.work():
            for mode, gate in GATES.items():
                parts[mode].append(gate.select(fleet.shared.theta, update))
            fleet.take(update, parts[options.follow][-1])
        found: dict[str, Any] = {"round": number, "reward": fleet.rewards[-1]}
        if number == 1 or number > FIRST:
            found |= {mode: asdict(measure(fleet, some)) for mode, some in parts.items()}
        if options.say:
            print(json.dumps(found), file=sys.stderr, flush=True)
        rounds.append(found)
        fleet.step()
    keys = ("model", "every", "trainers", "lr", "prompts", "group", "seed", "follow")
    setting = {key: getattr(options, key) for key in keys}
    return {**setting, "model": os.path.basename(options.model), "size": fleet.shared.theta.size, "rounds": rounds}


def ratios(found: dict[str, Any], mode: str, rounds: list[dict[str, Any]]) -> dict[str, float]:
    """How many times fewer bytes than dense, as means over rounds."""
    payload, ring = dense_bytes(found["size"], found["trainers"])
    some = [entry[mode] for entry in rounds if mode in entry]

    def mean(get: Any) -> float:
        return sum(map(get, some)) / len(some)

    return {
        "sent": mean(lambda r: r["share"]),
        "union": mean(lambda r: r["union"]),
        "bits": 8 * mean(lambda r: r["payload"]) / (found["size"] * mean(lambda r: r["share"])),
        "payload": payload / mean(lambda r: r["payload"]),
        "owner": ring / mean(lambda r: r["wire"]["owner"][0]),
        "gather": ring / mean(lambda r: r["wire"]["gather"][0]),
    }


HEADINGS = (
    "| lr | H | R | sent, round 1 | sent | union | mode | bits an entry | payload × (round 1) | payload × | "
    "wire ×, owner | wire ×, gather | payload × under DDP | wire × under DDP, owner |\n"
    "|--:|--:|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|"
)


def rows(found: dict[str, Any]) -> list[str]:
    out = []
    every = found["every"]
    for mode in ("exact", "compact"):
        first = ratios(found, mode, [entry for entry in found["rounds"] if entry["round"] == 1])
        steady = ratios(found, mode, [entry for entry in found["rounds"] if entry["round"] > FIRST])
        out.append(
            f"| {found['lr']:g} | {every} | {found['trainers']} | {first['sent']:.2%} | {steady['sent']:.2%} "
            f"| {steady['union']:.2%} | {mode} | {steady['bits']:.2f} | {first['payload']:.1f} "
            f"| {steady['payload']:.1f} | {steady['owner']:.1f} | {steady['gather']:.1f} "
            f"| {every * steady['payload']:.0f} | {every * steady['owner']:.0f} |"
        )
    return out


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a trainer's step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--follow", choices=["exact", "compact"], default="exact", help="gate whose updates are applied"
    )
    parser.add_argument("--grid", action="store_true", help="all settings, each in a process of its own")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--say", action="store_true", help="print every round as it ends")
    parser.add_argument("--json", action="store_true", help="run one setting; print JSON only")


def main(given: argparse.Namespace) -> None:
    if given.json:
        print(json.dumps(run(given)))
        return
    print(HEADINGS, flush=True)
    if not given.grid:
        single = run(given)
        print("\n".join(rows(single)))
        print(json.dumps({"bench": "loco", **provenance(), "settings": [single]}))
        return
    settings = [(lr, h, r) for lr in RATES for h in EVERY for r in TRAINERS]

    def one(setting: tuple[float, int, int]) -> dict[str, Any]:
        lr, every, trainers = setting
        command = [sys.executable, __file__, "--json", "--model", given.model, "--device", given.device]
        for name, value in (("lr", lr), ("every", every), ("trainers", trainers)):
            command += [f"--{name}", str(value)]
        for name in ("rounds", "prompts", "group", "seed", "follow"):
            command += [f"--{name}", str(getattr(given, name))]
        found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        return found

    longest_first = sorted(settings, key=lambda s: -s[1] * s[2])
    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip(longest_first, pool.map(one, longest_first), strict=True))
    for setting in settings:
        print("\n".join(rows(found[setting])))
    print(json.dumps({"bench": "loco", **provenance(), "settings": list(found.values())}))
