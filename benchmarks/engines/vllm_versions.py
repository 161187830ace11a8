"""Train SmolLM2 for 20 steps on real text, and publish every step: the run of vllm.py. About 90 seconds on 2 cores.

The weights are trained in FP32 by AdamW with the loss of the next token, on this project's own pages, and published as
BF16 with the model's configuration and tokenizer. Version 0 is the checkpoint. A line for each version gives the loss,
which fraction of the weights changed, and the bytes; it fails if one changed less than MIN_DENSITY. The figures are
kept next to the run, as RUN.json.

`Replay` writes any version as a folder that every engine can load.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save

from pulsesync import Publisher, Subscriber, warm_up
from pulsesync.state.checkpoint_files import companions, open_checkpoint

STEPS = 20
MIN_DENSITY = 0.003  # of the weights, in every version after 0
RATE = 3e-6  # of AdamW: a common one for reinforcement learning is 1e-6
ROWS, LENGTH = 4, 128  # tokens of a step
TIED = "lm_head.weight"  # which the checkpoint leaves out: it is the embedding
TEXT = Path(__file__).parents[2] / "docs"

Weights = dict[str, npt.NDArray[Any]]


# -- training ------------------------------------------------------------------------------------------------------


def batches(tokenizer: Any, seed: int = 0) -> Iterator[torch.Tensor]:
    """Rows of tokens from the project's pages, drawn without end."""
    text = "\n\n".join(path.read_text() for path in sorted(TEXT.glob("*.md")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    random = torch.Generator().manual_seed(seed)
    while True:
        begins = torch.randint(len(tokens) - LENGTH - 1, (ROWS,), generator=random)
        yield torch.stack([tokens[begin : begin + LENGTH + 1] for begin in begins])


def train(model: Any, tokenizer: Any, steps: int, rate: float) -> Iterator[float]:
    """Yield the loss of each step, after its weights are written."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _, rows in zip(range(steps), batches(tokenizer), strict=False):
        optimizer.zero_grad()
        logits = model(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def publish(folder: Path, run: Path, steps: int = STEPS, rate: float = RATE) -> dict[str, Any]:
    """Publish the versions 0 to `steps` of the model in a folder; return the figures of each."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    warm_up()  # otherwise the first publish compiles kernels
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found: list[dict[str, Any]] = []
    with Publisher(str(run), cast="BF16", files=companions(folder)) as publisher:
        publisher.publish(model, step=0)
        publisher.flush()  # the first anchor, so that it does not run during the next publish
        began = time.perf_counter()
        for step, loss in enumerate(train(model, tokenizer, steps, rate), 1):
            trained = time.perf_counter()
            report = publisher.publish(model, step=step)
            assert report.version == step, f"version {report.version} for step {step}"
            one = {
                "version": step,
                "loss": loss,
                "changed": report.changed,
                "density": report.density,
                "bytes": report.payload_bytes,
                "train_s": trained - began,
                "publish_s": time.perf_counter() - trained,
            }
            found.append(one)
            show(one)
            began = time.perf_counter()
    least = min(one["density"] for one in found)
    assert least >= MIN_DENSITY, f"a version changed {least:.3%} of the weights, less than {MIN_DENSITY:.1%}"
    return {"weights": report.total, "full_bytes": report.full_bytes, "rate": rate, "versions": found}


def show(one: dict[str, Any]) -> None:
    print(
        f"version {one['version']:2}: loss {one['loss']:.3f}, {one['density']:.3%} changed, {one['bytes']:,} bytes; "
        f"trained in {one['train_s']:.1f} s, published in {one['publish_s']:.2f} s",
        file=sys.stderr,
        flush=True,
    )


def ensure(folder: Path, run: Path) -> dict[str, Any]:
    """What was published into a run, which is made if it is not there."""
    log = Path(f"{run}.json")
    if not log.is_file():
        assert not run.exists(), f"{run} exists and {log.name} does not: delete the run, it may be a part of one"
        result = publish(folder, run)
        log.write_text(json.dumps(result) + "\n")
    out: dict[str, Any] = json.loads(log.read_text())
    return out


# -- any version of the run ----------------------------------------------------------------------------------------


class Replay:
    """The weights of a run in this process, as a trainer that writes checkpoints would have them."""

    def __init__(self, model: Path, run: Path) -> None:
        self.files = companions(model)
        self.weights: Weights = {name: np.array(array) for name, array in open_checkpoint(model).tensors.items()}
        self.named = {TIED: self.weights["model.embed_tokens.weight"], **self.weights}  # as the run names them
        self.subscriber = Subscriber(str(run))

    def go(self, version: int) -> str:
        """Sync the weights to a version; return their recomputed digest."""
        report = self.subscriber.sync(self.named, version, verify=True)
        assert report.version == version, f"{report.version} instead of {version}"
        return report.digest

    def checkpoint(self, folder: Path) -> int:
        """Write the weights as a Hugging Face folder, on the disk when this returns; return the bytes."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        data = save(self.weights, {"format": "pt"})
        with (folder / "model.safetensors").open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return len(data)
