"""What the adapter asks of SGLang, as its wheel has it: names, signatures, routes and the hashes of their files.

    python -m tests.integrations.sglang.record_interface VERSION WHEEL_OR_FOLDER

writes interface.json, next to this file. It reads source and runs none of it. A wheel is fetched with `pip download
--no-deps sglang==VERSION`; a folder is one that has the folder `sglang`, such as site-packages.
"""

import ast
import hashlib
import json
import sys
from pathlib import Path

from tests.integrations.vllm.record_interface import Entry, Read, asked, reader, routes

RECORD = Path(__file__).with_name("interface.json")
SESSION = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
# By file: what is asked of it, as Class.name, name, or Class.* for all that is public.
ASKED: dict[str, list[str]] = {
    "configs/load_config.py": ["LoadConfig.load_format"],
    "managers/io_struct.py": [
        "BeginWeightUpdateReqInput.*",
        "ContinueGenerationReqInput.*",
        "EndWeightUpdateReqInput.*",
        "PauseGenerationReqInput.*",
        "UpdateWeightsFromTensorReqInput.*",
    ],
    "managers/scheduler_components/weight_updater.py": [f"SchedulerWeightUpdaterManager.{name}" for name in SESSION],
    "managers/tokenizer_control_mixin.py": [f"TokenizerControlMixin.{name}" for name in SESSION],
    "managers/tp_worker.py": ["BaseTpWorker.deserialize_own_rank"],
    "model_executor/model_runner_components/weight_updater.py": [f"WeightUpdater.{name}" for name in SESSION],
    "model_loader/loader.py": ["DefaultModelLoader.Source", "DefaultModelLoader._get_weights_iterator"],
    "plugins/__init__.py": ["GENERAL_PLUGINS_GROUP", "load_plugins"],
    "plugins/hook_registry.py": ["HookRegistry.register", "HookType.AROUND"],
    "runtime_context.py": ["get_exec", "get_model", "get_parallel"],
    "utils/common.py": [
        "MultiprocessingSerializer.serialize",
        "MultiprocessingSerializer.deserialize",
        "dynamic_import",
    ],
}
# By file: lines that must be somewhere in it.
SAID: dict[str, list[str]] = {
    "arg_groups/fields/model.py": ["custom_weight_loader: A["],
    "arg_groups/fields/exec_.py": ["enable_eplb: A["],
    "arg_groups/fields/parallel.py": ["dp_size: A[", "attn_dp_size: A[", "ep_size: A[", "pp_size: A[", "tp_size: A["],
    "managers/scheduler.py": ["load_plugins()", "parent_process.send_signal(signal.SIGQUIT)"],
    "managers/scheduler_components/weight_updater.py": ['message="a weight-update session is already open; "'],
    "utils/common.py": ['("torch.storage", "_load_from_bytes")', '("torch._utils", "_rebuild_tensor_v2")'],
}
SERVER = "entrypoints/http_server.py"
CALLED = [f"POST /{name}" for name in [*SESSION, "pause_generation", "continue_generation"]]
CALLED += ["GET /model_info", "GET /server_info"]


def record(read: Read) -> Entry:
    """Everything that is asked of SGLang and that it has."""
    out: Entry = {}
    for path in sorted({*ASKED, *SAID, SERVER}):
        if (content := read(f"sglang/srt/{path}")) is None:
            continue
        out[f"sha256 of {path}"] = hashlib.sha256(content).hexdigest()
        tree = ast.parse(text := content.decode())
        out |= {f"{path}:{name}": value for name, value in asked(tree, ASKED.get(path, []))}
        out |= {f"{path} has {line!r}": "yes" for line in SAID.get(path, []) if line in text}
        if path == SERVER:
            out |= {name: value for name, value in routes(tree) if name in CALLED}
    return out


def load() -> tuple[str, Entry]:
    kept = json.loads(RECORD.read_text())
    return kept["version"], kept["names"]


def main(version: str, source: Path) -> None:
    entry = record(reader(source))
    RECORD.write_text(json.dumps({"version": version, "names": entry}, indent=1) + "\n")
    print(f"{version}: {len(entry)} names, files and routes, of {source.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
