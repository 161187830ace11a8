"""Make the checkpoint that the demo starts from: supervised, until the policy gets a quarter of the sums right."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from pulsesync.rl import task
from pulsesync.rl.policy import Policy, complete, fresh

BATCH = 256
RATE, WARM_UP = 1e-3, 100
CHECK_EVERY, CHECKED = 10, 1024
MOST_STEPS = 4000


def pretrain(seed: int, until: float = 0.25, tell: Callable[[int, float, float], None] = lambda *_: None) -> Policy:
    """Train from scratch until so many sampled completions are right; tell step, loss and share as it goes."""
    policy, generator = fresh(seed), torch.Generator().manual_seed(seed + 1)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(1, MOST_STEPS + 1):
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, step / WARM_UP)
        asked = task.prompts(BATCH, generator)
        right = task.answers(asked)
        logits = policy(torch.cat([asked, right], dim=1)[:, :-1])[:, -task.ANSWER :]
        loss = functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), right.reshape(-1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % CHECK_EVERY == 0:
            asked = task.prompts(CHECKED, generator)
            share = float(task.rewards(asked, complete(policy, asked, task.ANSWER, generator)[0]).mean())
            tell(step, float(loss.detach()), share)
            if share >= until:
                break
    return policy


def save(policy: Policy, path: Path) -> None:
    """Write the BF16 values, as an inference checkpoint has them."""
    from safetensors.torch import save_file

    save_file({name: weight.to(torch.bfloat16).contiguous() for name, weight in policy.state_dict().items()}, path)
