"""Make the checkpoint that the demo starts from: supervised, until the policy solves a quarter of the sums."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from pulsesync_lab.demo import task
from pulsesync_lab.demo.game import AdditionGame
from pulsesync_lab.demo.policy import SHIPPED, Policy, PolicyShape, fresh

BATCH = 256
RATE, WARM_UP = 1e-3, 100
CHECK_EVERY, CHECKED = 10, 1024
MOST_STEPS = 4000
SHARE = "share"  # in a saved policy's metadata


def pretrain(
    seed: int,
    until: float = 0.25,
    report: Callable[[int, float, float], None] = lambda *_: None,
    *,
    shape: PolicyShape = SHIPPED,
    device: str = "cpu",
    most_steps: int = MOST_STEPS,
) -> Policy:
    """Train from scratch until this share of sampled completions is correct; report step, loss and share meanwhile.

    It may end earlier, after `most_steps`: the last reported share is the result.
    """
    policy, generator = fresh(seed, shape).to(device), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    sums = AdditionGame(1, device)
    for step in range(1, most_steps + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        asked = task.prompts(BATCH, generator)
        right = task.answers(asked)
        asked, right = asked.to(device), right.to(device)
        logits = policy(torch.cat([asked, right], dim=1)[:, :-1])[:, -task.ANSWER :]
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), right.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            share = float(sums.sample(policy, CHECKED, generator).rewards.mean())
            report(step, float(loss.detach()), share)
            if share >= until:
                break
    return policy


def save(policy: Policy, path: Path, share: float | None = None) -> None:
    """Write the BF16 values, as in an inference checkpoint, and the share of correct answers, if it is known."""
    from safetensors.torch import save_file

    saved = None if share is None else {SHARE: str(share)}
    weights = {name: weight.to(torch.bfloat16).contiguous() for name, weight in policy.state_dict().items()}
    save_file(weights, path, saved)


def share_of(path: Path) -> float | None:
    """The share that was saved with a policy."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        saved = (file.metadata() or {}).get(SHARE)
    return None if saved is None else float(saved)
