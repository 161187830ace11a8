"""Trainers of several ranks, as torchrun starts them: python -m torch.distributed.run … ranks.py FOLDER KIND...

KIND is ddp; fsdp2, fsdp2-tied, fsdp2-adapter or fsdp2-merged, which Accelerate shards; or native or native-tied,
which transformers shards with FSDP2 when it loads a model. They train one after another, because it takes seconds to
import transformers. The run is FOLDER/KIND/run. Every rank writes to FOLDER/KIND/result-rank the weights of every step,
as they are gathered from all ranks, the versions of its callback, why it was refused, and the kinds of its parameters.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

from pulsesync.errors import StateError
from pulsesync.integrations.huggingface import PulseCallback
from pulsesync.integrations.peft import adapter_weights
from pulsesync.integrations.pretrained import checkpoint_weights
from tests.integrations.hf import models


class Gathers(TrainerCallback):  # type: ignore[misc]
    """Keeps the gathered weights after every step. Every rank calls this."""

    def __init__(self, read: Any) -> None:
        self.read, self.kept = read, dict[int, dict[str, torch.Tensor]]()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.kept[state.global_step] = {
            name: (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).bfloat16().clone()
            for name, tensor in self.read(model).items()
        }


def load_sharded(model: Any, folder: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()), dtype=torch.float32
    )


def train(kind: str, folder: Path) -> Any:
    """Train, and write what was found; return what must live until the process ends."""
    run = str(folder / "run")
    options: dict[str, Any] = {}
    if kind.startswith("fsdp"):
        options = {"fsdp": True, "fsdp_config": {"version": 2}}
    model = models.qwen2() if kind.endswith("-tied") else models.llama()
    if kind.startswith("native"):
        model = load_sharded(model, f"{run}-start")
    read: Any = checkpoint_weights
    adapters = "only" if kind == "fsdp2-adapter" else None
    if kind in ("fsdp2-adapter", "fsdp2-merged"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))
        read = lambda model: adapter_weights(model)[0]  # noqa: E731
    cast = {"cast": "BF16"}
    if kind.startswith("native"):
        options, cast = {"bf16": True}, {}  # mixed precision: the callback finds the cast
    callback, gathers = PulseCallback(run, every_step=True, adapters=adapters, **cast), Gathers(read)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=f"{run}-out",
            use_cpu=True,
            report_to=[],
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        ),
        train_dataset=models.rows(32),
        data_collator=default_data_collator,
        processing_class=models.tokenizer(),
        callbacks=[callback, gathers],
    )
    if kind.startswith("fsdp"):
        # Accelerate chooses FSDP on accelerators alone; its code for that runs on CPUs as well, over gloo.
        trainer.accelerator.state.distributed_type = DistributedType.FSDP
        trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
        trainer.is_fsdp_enabled = True
    refused = ""
    try:
        trainer.train()
    except StateError as e:
        refused = str(e)
    kinds = sorted({type(parameter).__name__ for parameter in trainer.model.parameters()})
    found = {"steps": gathers.kept, "versions": callback.versions, "refused": refused, "parameters": kinds}
    torch.save(found, folder / f"result-{dist.get_rank()}")
    dist.barrier()
    return trainer


def main(folder: str, *kinds: str) -> None:
    dist.init_process_group("gloo")
    settings, trained = dict(os.environ), []
    for kind in kinds:
        print(f"{kind} ...", flush=True)
        trained.append(train(kind, Path(folder) / kind))
        os.environ.clear()  # the arguments of a Trainer set variables for Accelerate
        os.environ.update(settings)
    # Not by a return: when DDP frees its gloo group, torch waits, with the GIL, for a thread that may need the GIL.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
