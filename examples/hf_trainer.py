"""Train a small language model with Hugging Face's Trainer, and follow its weights into a loadable folder.

    python examples/hf_trainer.py runs/hf

The one line that publishes is the callback. The model is tiny and random, so nothing is downloaded. While it trains,
every step is published; then the run is followed as with `pulse follow`, and transformers loads the folder. Ends with

    version 10: the folder loads with the trainer's weights, bit for bit
"""

import argparse
import os
import tempfile

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from pulsesync.integrations.folder import HuggingFaceFolder
from pulsesync.integrations.huggingface import PulseCallback


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def main() -> None:
    parser = argparse.ArgumentParser(description="Publish from Hugging Face's Trainer, and follow into a folder.")
    parser.add_argument("location", help="where to publish: a folder, or a URL such as s3://bucket/run")
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config)  # FP32 master weights
    texts = [torch.randint(512, (16,)).tolist() for _ in range(64)]
    callback = PulseCallback(given.location, cast="BF16", every_step=True)  # workers use BF16

    with tempfile.TemporaryDirectory() as scratch:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                scratch,
                max_steps=given.steps,
                learning_rate=3e-6,
                use_cpu=True,
                report_to=[],
                save_strategy="no",
                dataloader_pin_memory=False,
            ),
            train_dataset=[{"input_ids": text, "labels": text} for text in texts],
            data_collator=default_data_collator,
            callbacks=[callback],
        )
        trainer.train()
        print(f"{len(callback.versions)} versions, {callback.sent_bytes:,} bytes of {model.num_parameters():,} weights")

        with HuggingFaceFolder(given.location, f"{scratch}/weights") as folder:
            update = folder.update()
        loaded = AutoModelForCausalLM.from_pretrained(os.path.realpath(f"{scratch}/weights/current"))
    trained = model.bfloat16().state_dict()
    assert update is not None
    assert all(same_bits(weight, trained[name]) for name, weight in loaded.state_dict().items())
    print(f"version {update.mark.version}: the folder loads with the trainer's weights, bit for bit")


if __name__ == "__main__":
    main()
