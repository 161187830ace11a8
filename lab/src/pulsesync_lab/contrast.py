"""A small policy compared with a language model: what a sync sends for each, and why the two differ. No torch.

The policy that the demo trains learns at a rate far above that of RL on language models, so a large share of its BF16
weights changes in every step. Steps recorded from a language model show what syncs are like there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pulsesync.state.checkpoint_files import open_file
from pulsesync_lab.demo.replay import RECORDED, load, start_of
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.view import Line
from pulsesync_lab.study.predict.theory import thresholds

POLICY = Path(__file__).parent / "demo" / "policy.safetensors"  # from which a run of the demo starts

WHY = """\
Why they differ: a BF16 weight changes only if it moves by more than half the gap to its next BF16 value, and a step \
of Adam moves it by about the learning rate or less.
The learning rate exceeds half the gap for {small:.1%} of the policy's weights at the start, and for {large:.1%} of \
SmolLM2's; shorter moves add up in the trainer's FP32 weights until they show.
RL on pretrained language models uses learning rates of 1e-6 to 3e-6, at which a policy as small as the demo's would \
hardly learn."""


def makes_sense(settings: DemoSettings) -> bool:
    """Whether the recorded steps are replayed after a run: after a default demo, unless it shows something else.

    Full weights, several steps a version and several trainers are not comparable with the recording; and a run with the
    user's own store or link is about these.
    """
    other_bytes = settings.sync != "pulse" or settings.publish_every > 1 or settings.trainers > 1
    other_place = bool(settings.store or settings.read or settings.link)
    return settings.model == "demo" and not other_bytes and not other_place


def policy_weights() -> NDArray[Any]:
    """The BF16 weights that a run of the demo starts from, end to end."""
    return _end_to_end(open_file(POLICY))


def recorded_weights() -> NDArray[Any]:
    """The BF16 weights that the recorded steps start from, end to end."""
    return _end_to_end(start_of(load(RECORDED)))


def _end_to_end(weights: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate([weight.reshape(-1) for weight in weights.values()])


def share_in_reach(weights: NDArray[Any], lr: float) -> float:
    """The share of BF16 weights for which a learning rate exceeds half the gap to the next value away from zero."""
    return float(np.mean(thresholds(weights)[1] < lr))


def announce(replay: DemoSettings) -> str:
    """A line about the replay that follows."""
    model = f"GRPO on SmolLM2-135M at learning rate {replay.lr:g}, six of its tensors"
    return f"Now {replay.steps} recorded steps of a real language model: {model}."


def compare(live: Line, live_lr: float, recorded: Line, recorded_lr: float) -> str:
    """Both summaries, one line each, and the reason for the difference."""
    heading = _row("What a sync sent", "weights", "learning rate", "changed", "bytes", "")
    policy, language_model = _figures(live, live_lr), _figures(recorded, recorded_lr)
    rows = [_row("  the demo's policy", *policy), _row("  SmolLM2-135M, a slice", *language_model)]
    return "\n".join([heading, *rows, WHY.format(small=live["in_reach_share"], large=recorded["in_reach_share"])])


def _figures(summary: Line, lr: float) -> tuple[str, str, str, str, str]:
    changed, size = f"{summary['changed_share']:.1%}", f"{summary['bytes_per_sync']:,.0f}"
    times = f"{summary['times_smaller']:.0f} times smaller than all weights"
    return f"{summary['weights']:,}", f"{lr:g}", changed, size, times


def _row(name: str, weights: str, lr: str, changed: str, size: str, times: str) -> str:
    return f"{name:<23}{weights:>10}{lr:>15}{changed:>9}{size:>10}  {times:>35}".rstrip()
