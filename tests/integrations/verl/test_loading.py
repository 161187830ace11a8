"""How verl finds the adapter: by its configuration, and by the entry point. Each in a process of its own."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass

from pulsesync.integrations.verl import PulseCheckpointEngine

pytestmark = pytest.mark.timeout(300)  # a process that imports verl takes seconds, and minutes on a busy machine
PAGE = Path(__file__).parents[3] / "docs" / "integrations" / "verl.md"
PLACE = "actor_rollout_ref.rollout.checkpoint_engine"
OVERRIDES = re.findall(r"^    (\+?actor\S+)", PAGE.read_text(), re.MULTILINE)


def run(program: str, plugins: str) -> str:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": plugins}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IS_THERE = "from verl.checkpoint_engine.base import CheckpointEngineRegistry as r; print('pulse' in r._registry)"
MADE = (
    "from verl.checkpoint_engine.base import CheckpointEngineManager; from verl.workers.config import "
    "CheckpointEngineConfig; print(CheckpointEngineManager(CheckpointEngineConfig(backend='pulse', "
    "custom_backend_module='pulsesync.integrations.verl'), None, []).backend_cls.__name__)"
)


@pytest.mark.parametrize("plugins", ["auto", "pulse"])
def test_importing_verl_is_enough_where_its_plugins_are_loaded(plugins: str) -> None:
    assert run(IS_THERE, plugins) == "True"


def test_without_plugins_the_configuration_names_the_module() -> None:
    assert run(f"{IS_THERE}; {MADE}", "none").split() == ["False", "PulseCheckpointEngine"]


def test_the_page_has_three_settings() -> None:
    assert len(OVERRIDES) == 3


def test_the_entry_point_is_a_module_of_this_package() -> None:
    (found,) = entry_points(group="verl.plugins", name="pulse")
    assert found.load().PulseCheckpointEngine is PulseCheckpointEngine


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("trainer", "ppo_trainer"),
        ("trainer", "ppo_megatron_trainer"),
        ("experimental/one_step_off_policy", "one_step_off_ppo_trainer"),
        ("experimental/fully_async_policy", "fully_async_ppo_trainer"),
    ],
)
def test_verls_own_configurations_take_the_lines_of_the_page(
    folder: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(verl.__file__).parent
    monkeypatch.chdir(package.parent)  # where the experimental ones look for those that they extend
    with initialize_config_dir(str(package / folder / "config"), version_base=None):
        composed = compose(name, overrides=[*OVERRIDES, f"+{PLACE}.engine_kwargs.pulse.trust=[{'ab' * 32}]"])
    check(composed.actor_rollout_ref.rollout.checkpoint_engine, {"ab" * 32})


def test_the_yaml_of_the_page_is_the_same() -> None:
    yaml = re.findall(r"```yaml\n(.+?)```", PAGE.read_text(), re.DOTALL)[0]
    found = OmegaConf.create(yaml).actor_rollout_ref.rollout.checkpoint_engine
    check(OmegaConf.merge({"_target_": "verl.workers.config.CheckpointEngineConfig"}, found), None)


def check(given: Any, trust: set[str] | None) -> None:
    config = omega_conf_to_dataclass(given)
    assert CheckpointEngineManager(config, None, []).backend_cls is PulseCheckpointEngine
    made = CheckpointEngineRegistry.new(config.backend, bucket_size=1, **config.engine_kwargs[config.backend])
    assert (made.location, made._trust) == ("s3://bucket/run", trust)
