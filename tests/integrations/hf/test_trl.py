"""GRPO with TRL: a worker has the trainer's weights after each version, with a whole model and with an adapter."""

from pathlib import Path
from typing import Any

import pytest

REASON = "needs the packages of Hugging Face and TRL: make test-trl runs it"
pytest.importorskip("transformers", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)
pytest.importorskip("trl", reason=REASON)
datasets = pytest.importorskip("datasets", reason=REASON)

import torch  # noqa: E402 - after what skips the module
from transformers import TrainerCallback  # noqa: E402

from pulsesync import Subscriber  # noqa: E402
from pulsesync.integrations.huggingface import PulseCallback  # noqa: E402
from pulsesync.integrations.peft import is_peft, merged_weights  # noqa: E402
from pulsesync.integrations.pretrained import checkpoint_weights  # noqa: E402
from tests.integrations.hf import models  # noqa: E402

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Follows(TrainerCallback):  # type: ignore[misc]
    """A worker that syncs to the version of every step and compares."""

    def __init__(self, callback: Any, run: str) -> None:
        self.callback, self.subscriber = callback, Subscriber(run)
        self.weights: dict[str, torch.Tensor] = {}
        self.wrong: dict[int, list[str]] = {}
        self.changed: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        read = merged_weights if is_peft(model) else checkpoint_weights
        wanted = {name: tensor.bfloat16() for name, tensor in read(model).items()}
        if not self.weights:
            self.weights = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        version = self.callback.version_of(state.global_step, timeout_s=60)
        report = self.subscriber.sync(self.weights, version=version, wait_s=60)  # for the first anchor
        self.wrong[state.global_step] = models.differing(self.weights, wanted)
        self.changed.append(report.changed)


@pytest.mark.parametrize("adapter", [False, True], ids=["whole model", "LoRA"])
def test_a_worker_has_the_weights_of_every_step_of_grpo(adapter: bool, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    callback = PulseCallback(str(tmp_path / "run"), cast="BF16")
    follows = Follows(callback, str(tmp_path / "run"))
    trainer = GRPOTrainer(
        model=models.qwen2(),
        reward_funcs=lambda completions, **_: [float(text.count("a") + len(set(text))) for text in completions],
        args=GRPOConfig(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            max_steps=3,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            learning_rate=1e-3,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a b", "c d", "e f", "g h"]}),
        processing_class=models.tokenizer(),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        if adapter
        else None,
        callbacks=[callback, follows],
    )
    trainer.train()
    assert follows.wrong == {1: [], 2: [], 3: []}
    assert callback.versions == {0: 0, 1: 1, 2: 2, 3: 3}
    assert sum(follows.changed[1:]) > 0
