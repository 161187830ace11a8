"""What share of a training step does a Recorder take?

    python -m benchmarks recorder [--steps 40]
    python -m benchmarks recorder --device cuda --model FOLDER

Two copies of a policy learn from the same rollouts in turn, one with a Recorder on its optimizer and one without, in
one process; which copy goes first alternates. Both must end with the same bits. The share is the median over steps of
how much longer the recorded copy took than the other, for learning alone and for learning with the rollouts before it.
On a CPU this is the policy of `pulse demo` (1.24 million weights, 32 prompts × 8, lr 6e-5); with a model it is a
checkpoint such as SmolLM2-135M's that learns to add (32 prompts × 16, lr 3e-6).
"""

import argparse
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.harness import device
from benchmarks.harness.report import json_line, provenance, table
from benchmarks.harness.timing import timed
from pulsesync_lab.demo.game import open_game
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.study import Recorder

QUICK = ("--steps", "2", "--prompts", "4")
WARM_UP = 3  # steps
SEED = 1
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no dtypes to compare with": {"contrast": ()},
    "a sample of 2^16 alone": {"whole": False, "sample": 1 << 16},
}


class Learner:
    """A policy, its optimizer, and how long each step took."""

    def __init__(self, game: Any, policy: Any, lr: float) -> None:
        self.game, self.policy = game, policy
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
        self.seconds: list[float] = []

    def learn(self, rollouts: Any) -> None:
        learn = partial(self.game.learn, self.policy, self.optimizer, rollouts)
        self.seconds.append(timed(learn, device.wait)[1])


def measure(game: Any, settings: DemoSettings, options: dict[str, Any]) -> dict[str, float]:
    start = game.policy()
    plain, watched = (Learner(game, deepcopy(start), settings.lr) for _ in range(2))
    playing = []
    with Recorder(**options).attach(watched.optimizer, watched.policy) as recorder:
        for step in range(WARM_UP + settings.steps):
            play = partial(game.play, plain.policy, settings.prompts, SEED + step)
            rollouts, seconds = timed(play, device.wait)
            playing.append(seconds)
            for one in (plain, watched) if step % 2 else (watched, plain):
                one.learn(rollouts)
        recording = recorder.close()
    same = zip(plain.policy.parameters(), watched.policy.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same), "the recorder changed what was learned"
    without, with_, played = (np.array(s[WARM_UP:]) for s in (plain.seconds, watched.seconds, playing))
    inside = np.array([step.seconds for step in recording.steps[WARM_UP:]])
    return {
        "learn_s": float(np.median(without)),
        "play_s": float(np.median(played)),
        "recorder_s": float(np.median(inside)),
        "share_of_learning": float(np.median((with_ - without) / without)),
        "share_of_step": float(np.median((with_ - without) / (without + played))),
        "recorder_over_learning": float(np.median(inside / without)),
        "density": float(np.mean(recording.density()[WARM_UP:])),
        "weights": recording.size,
    }


def row(name: str, got: dict[str, float]) -> list[str]:
    return [
        name,
        f"{got['weights']:,}",
        f"{got['density']:.2%}",
        f"{1e3 * got['learn_s']:.1f}",
        f"{1e3 * got['play_s']:.1f}",
        f"{1e3 * got['recorder_s']:.2f}",
        f"{got['share_of_learning']:.1%}",
        f"{got['recorder_over_learning']:.1%}",
        f"{got['share_of_step']:.1%}",
    ]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="demo", help="a folder with a Hugging Face checkpoint")


def main(given: argparse.Namespace) -> None:
    demo = given.model == "demo"
    settings = DemoSettings(
        steps=given.steps,
        model=given.model,
        device=given.device,
        prompts=given.prompts,
        group=8 if demo else 16,
        lr=6e-5 if demo else 3e-6,
    )
    game = open_game(settings)
    found = {name: measure(game, settings, options) for name, options in VARIANTS.items()}
    print(f"{given.model} on {given.device}: medians of {given.steps} steps.\n")
    head = ["recorder", "weights compared", "changed", "learn, ms", "play, ms", "recorder, ms"]
    head += ["more than without", "recorder / learn", "of learn + play"]
    print(table(head, [row(name, got) for name, got in found.items()]) + "\n")
    gpu = torch.cuda.get_device_name() if given.device.startswith("cuda") else None
    print(json_line({"bench": "recorder", **provenance("torch"), "gpu": gpu, "seed": SEED, "found": found}))
