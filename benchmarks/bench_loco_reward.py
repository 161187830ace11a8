"""Does a policy learn as well by PULSELoCo as by dense DiLoCo? Real GRPO in closed loop, several seeds, with controls.

    python benchmarks/bench_loco_reward.py --jobs 16                       # the demo's policy: all arms, five seeds
    python benchmarks/bench_loco_reward.py --model .models/smollm2 --device cuda --lr 1e-6 --arms dense,gate --seeds 3

Fixed beforehand: no worse means that the 95 % interval of the paired difference to dense DiLoCo in final reward lies
above −MARGIN; and it says something only if dense DiLoCo beats the untouched policy by more than MARGIN. Final reward
is measured on the same prompts for everybody. top-k and random-k, with error feedback, get as many bytes in each round
as the gate took with the same seed; "slow" is dense DiLoCo with a smaller outer step, to see whether moving less
explains what the gate does; --forward BF16 lets trainers compute with the BF16 values of their masters, as autocast
does, which is what the gate assumes (on a CPU the demo computes in FP32); "reach" is the gate that asks whether
lr / (1 − momentum) times an update would be seen. ddp averages gradients at each step, with rollouts of that step and
no outer step: another regime, for orientation. top-k and random-k are coded by what was made for the gate (random-k
needs no positions at all): better coders would favour them more. All seeds are evaluated on one draw of prompts.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from bench_codec import provenance
from fleet import Chosen, Fleet, NoFeedback

from pulsesync.lab.demo.game import open_game
from pulsesync.lab.demo.settings import DemoSettings
from pulsesync.loco.gate import DenseGate, GateRule, VisibilityGate
from pulsesync.loco.outer import SGD, Nesterov

MARGIN = 0.03
ARMS = ("dense", "gate", "reach", "reach compact", "compact", "no feedback", "top-k", "random-k", "slow", "ddp")
OUTERS = {"nesterov": (Nesterov(0.7, 0.9), Nesterov(0.5, 0.9)), "average": (SGD(1.0), SGD(0.7))}  # and slow
T95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # by seeds


def run(options: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """One arm with one seed."""
    import torch

    torch.set_num_threads(1 if options.device == "cpu" else 8)
    game = open_game(DemoSettings(model=options.model, device=options.device, group=options.group))
    fleet = Fleet(
        game,
        trainers=options.trainers,
        sync_every=options.every,
        lr=options.lr,
        outer=OUTERS[options.outer][arm == "slow"],
        prompts=options.prompts,
        group=options.group,
        seed=seed,
        forward=options.forward,
    )
    rules: dict[str, list[GateRule]] = {
        "gate": [VisibilityGate()],
        "reach": [VisibilityGate(None, OUTERS[options.outer][0].reach)],
        "reach compact": [VisibilityGate(2, OUTERS[options.outer][0].reach)],
        "compact": [VisibilityGate(3)],
        "no feedback": [NoFeedback()],
        "top-k": [Chosen(True, seed * 100 + r) for r in range(options.trainers)],
        "random-k": [Chosen(False, seed * 100 + r) for r in range(options.trainers)],
    }
    rule = rules.get(arm, [DenseGate()]) * options.trainers
    budget = json.loads(Path(options.budget).read_text())["payload"] if options.budget else []
    began, payloads, fired, evaluated = time.time(), [], [], [fleet.evaluate(options.evaluated)]
    for number in range(options.rounds):
        if arm == "ddp":
            fleet.work_together()
        else:
            updates, coder, theta = fleet.work(), fleet.coder(rule[0]), fleet.shared.theta
            if budget:
                bits = 8 * payloads[-1] / (fired[-1] * theta.size) if payloads else 30.0
                for one in rule[: options.trainers]:
                    assert isinstance(one, Chosen)
                    one.count = int(8 * budget[number] / bits)
            splits = [one.split(theta, s) for one, s in zip(rule, updates, strict=False)]
            told = (
                splits if options.device == "cpu" else splits[:1]
            )  # of a large model, one trainer's bytes stand for all
            payloads.append(float(np.mean([len(coder.encode("00000", s.sent, s.unit)) for s in told])))
            fired.append(float(np.mean([s.sent.positions.size for s in splits])) / theta.size)
            fleet.commit(splits)
        if (number + 1) % options.look_every == 0 or number + 1 == options.rounds:
            evaluated.append(fleet.evaluate(options.evaluated))
        if options.say:
            print(
                arm,
                seed,
                number + 1,
                f"{fleet.rewards[-1]:.3f} {evaluated[-1]:.4f}",
                *payloads[-1:],
                *fired[-1:],
                f"{time.time() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return {
        "options": _kept(options),
        "arm": arm,
        "seed": seed,
        "start": evaluated[0],
        "final": evaluated[-1],
        "evaluated": evaluated,
        "rewards": fleet.rewards,
        "payload": payloads,
        "fired": fired,
        "dense_bytes": 4 * fleet.shared.theta.size,
        "seconds": time.time() - began,
    }


def _kept(options: argparse.Namespace) -> dict[str, Any]:
    """What two runs must have in common to be compared."""
    names = ("model", "lr", "every", "trainers", "rounds", "outer", "forward", "prompts", "group", "evaluated")
    return {name: getattr(options, name) for name in names}


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval."""
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return float(np.mean(values)), T95.get(len(values), 2.26) * spread / math.sqrt(len(values))


def table(found: dict[tuple[str, int], dict[str, Any]]) -> str:
    """All arms against dense DiLoCo, by seed."""
    start = float(np.mean([result["start"] for result in found.values()]))
    out = [
        f"Untouched policy: {start:.4f}. Margin, fixed beforehand: {MARGIN}.\n",
        "| arm | final reward, 95 % interval | minus dense, paired | no worse than dense by the margin? | fired | "
        "payload × under dense | seeds |\n|---|--:|--:|---|--:|--:|--:|",
    ]
    for arm in ARMS:
        some = {seed: result for (name, seed), result in found.items() if name == arm}
        if not some:
            continue
        mean, half = interval([result["final"] for result in some.values()])
        pairs = [result["final"] - found["dense", seed]["final"] for seed, result in some.items()]
        off, off_half = interval(pairs)
        verdict = "no, worse" if off + off_half < -MARGIN else "yes" if off - off_half > -MARGIN else "not shown"
        if arm == "dense":
            verdict = "–"
        steady = [result["payload"][3:] for result in some.values() if result["payload"]]
        ratio = next(iter(some.values()))["dense_bytes"] / np.mean(steady) if steady else float("nan")
        fired = np.mean([result["fired"][3:] for result in some.values()]) if steady else float("nan")
        out.append(
            f"| {arm} | {mean:.4f} ± {half:.4f} | {off:+.4f} ± {off_half:.4f} | {verdict} | {fired:.2%} | {ratio:.1f} "
            f"| {len(some)} |"
        )
    dense = [result["final"] for (name, _), result in found.items() if name == "dense"]
    mean, half = interval(dense)
    told = "does" if mean - half - start > MARGIN else "does NOT"
    out.append(
        f"\nDense DiLoCo {told} beat the untouched policy by more than the margin ({mean - start:+.4f} ± {half:.4f})."
    )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--outer", choices=list(OUTERS), default="nesterov")
    parser.add_argument("--forward", choices=["FP32", "BF16"], default="FP32", help="values that trainers compute with")
    parser.add_argument("--prompts", type=int, default=8, help="of a trainer's step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--evaluated", type=int, default=512, help="prompts")
    parser.add_argument("--look-every", type=int, default=5, help="rounds between evaluations")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("loco_reward"), help="folder for every run's result")
    parser.add_argument("--say", action="store_true")
    parser.add_argument("--one", help="arm:seed, in this process")
    parser.add_argument("--budget", help="result of the gate, whose bytes to keep to")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def place(arm: str, seed: int) -> Path:
        folder: Path = options.out
        return folder / f"{arm.replace(' ', '-')}-{seed}.json"

    if options.one:
        arm, _, seed = options.one.partition(":")
        place(arm, int(seed)).write_text(json.dumps(run(options, arm, int(seed))))
        return
    arms, done = options.arms.split(","), {}
    if "dense" not in arms or ({"top-k", "random-k"} & set(arms) and "gate" not in arms):
        raise SystemExit("arms are compared with dense, and top-k and random-k take the bytes of gate: give these too")
    given = sys.argv[1:]

    def start(arm: str, seed: int, gate: Future[None] | None) -> None:
        if place(arm, seed).exists():
            if json.loads(place(arm, seed).read_text())["options"] != _kept(options):
                raise SystemExit(f"{place(arm, seed)} is of a run with other options: give another folder to --out")
            return
        command = [sys.executable, __file__, *given, "--one", f"{arm}:{seed}"]
        if arm in ("top-k", "random-k") and gate is not None:
            gate.result()
            command += ["--budget", str(place("gate", seed))]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        for arm in sorted(arms, key=lambda arm: (arm != "gate", arm in ("top-k", "random-k"))):
            for seed in range(options.seeds):
                done[arm, seed] = pool.submit(start, arm, seed, done.get(("gate", seed)))
        for future in done.values():
            future.result()
    found = {key: json.loads(place(*key).read_text()) for key in done}
    print(table(found))
    print(json.dumps({"bench": "loco-reward", **provenance(), "command": given, "runs": list(found.values())}))


if __name__ == "__main__":
    main()
