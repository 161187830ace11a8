"""What the adapter asks of verl, as its wheel has it: names, signatures and the hashes of their files.

    python -m tests.integrations.verl.record_interface VERSION WHEEL_OR_FOLDER

writes interface.json, next to this file. It reads source and runs none of it. A wheel is fetched with `pip download
--no-deps verl==VERSION`; a folder is one that has the folder `verl`, such as site-packages.

Some of it cannot run without a GPU: verl's training engines, its adapters of vLLM and SGLang, and its own transfers.
What docs/integrations/verl.md says of those was read in the files whose hashes are kept here.
"""

import ast
import hashlib
import json
import sys
from pathlib import Path

from tests.integrations.vllm.record_interface import Entry, Read, asked, reader

RECORD = Path(__file__).with_name("interface.json")
ENGINES = ["get_per_tensor_param", "get_per_tensor_param_shard", "get_per_tensor_param_delta_shard"]
WORKER = ["update_weights", "execute_checkpoint_engine"]
# By file: what is asked of it, as Class.name, name, or Class.* for all that is public.
ASKED: dict[str, list[str]] = {
    "__init__.py": ["_plugins_policy"],
    "checkpoint_engine/base.py": [
        "CheckpointEngineRegistry.*",
        "CheckpointEngine.*",
        "CheckpointEngineManager.*",
        *(f"CheckpointEngineWorker.{name}" for name in ["__init__", *WORKER]),
    ],
    "checkpoint_engine/delta_checkpoint_engine.py": ["DeltaShardedCheckpointEngine.*"],
    "checkpoint_engine/nccl_checkpoint_engine.py": ["NCCLCheckpointEngine.*"],
    "utils/device.py": ["get_device_id", "get_device_name", "get_torch_device"],
    "workers/config/rollout.py": ["CheckpointEngineConfig.*"],
    "workers/engine_workers.py": [f"ActorRolloutRefWorker.{name}" for name in WORKER],
    "workers/engine/fsdp/transformer_impl.py": [f"FSDPEngine.{name}" for name in ENGINES],
    "workers/engine/megatron/transformer_impl.py": [f"MegatronEngine.{name}" for name in ENGINES],
    "workers/rollout/base.py": ["BaseRollout.*"],
    "workers/rollout/utils.py": ["ensure_async_iterator"],
    "workers/rollout/vllm_rollout/bucketed_weight_transfer.py": ["BucketedWeightSender.async_send_weights"],
    "workers/rollout/vllm_rollout/delta_weight_transfer.py": ["VERL_DELTA_WEIGHT_TRANSFER_BACKEND"],
    "workers/rollout/vllm_rollout/vllm_rollout.py": ["ServerAdapter.update_weights"],
    "workers/rollout/sglang_rollout/sglang_rollout.py": ["ServerAdapter.update_weights", "_to_ipc_device"],
    "workers/rollout/sglang_rollout/delta_loader.py": ["apply_delta", "LOADER_FQN"],
}
# By file: lines that must be somewhere in it.
SAID: dict[str, list[str]] = {
    "__init__.py": ['_entry_points(group="verl.plugins")', "_ep.load()"],
    "workers/engine_workers.py": [
        'if effective_mode == "delta_sharded":',  # only this name is given the training engine, and so its shards
        "per_tensor_param, _ = self.actor.engine.get_per_tensor_param()",
        "import_external_libs(checkpoint_engine_config.custom_backend_module or None)",
        "backend, is_master=(torch.distributed.get_rank() == 0), bucket_size=bucket_size, **engine_kwargs",
    ],
    "workers/rollout/vllm_rollout/vllm_async_server.py": [
        'if getattr(checkpoint_config, "backend", None) == "delta_sharded":'  # or vLLM cannot receive delta flushes
    ],
    "workers/rollout/vllm_rollout/delta_weight_transfer.py": ["Restarting only the vLLM workers is unsafe"],
    "workers/rollout/sglang_rollout/delta_loader.py": ["torch.where(torch.isnan(cast), self, cast)"],
}


def record(read: Read) -> Entry:
    """Everything that is asked of a version and that it has."""
    out: Entry = {}
    for path in sorted({*ASKED, *SAID}):
        if (content := read(f"verl/{path}")) is None:
            continue
        out[f"sha256 of verl/{path}"] = hashlib.sha256(content).hexdigest()
        text = content.decode()
        module = f"verl/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        out |= {f"{module}:{name}": value for name, value in asked(ast.parse(text), ASKED.get(path, []))}
        out |= {f"{module} has {line!r}": "yes" for line in SAID.get(path, []) if line in text}
    return out


def load() -> tuple[str, Entry]:
    """The version that was recorded, and its record."""
    kept = json.loads(RECORD.read_text())
    return kept["version"], kept["names"]


def main(version: str, source: Path) -> None:
    entry = record(reader(source))
    RECORD.write_text(json.dumps({"version": version, "names": entry}, indent=1, sort_keys=True) + "\n")
    print(f"{version}: {len(entry)} names, files and lines, of {source.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
