"""The parts of an experiment, as values that can be saved and compared."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pulsesync_lab.demo.policy import SHIPPED, PolicyShape

CONFIG = "config.json"

Algorithm = Literal["grpo", "reinforce", "ppo", "sft", "td3"]
Masters = Literal["fp32", "bf16", "rounded"]


@dataclass(frozen=True)
class Arm:
    """A training run without its seed. Two runs of one arm with one seed on a CPU yield equal weights."""

    name: str
    game: Literal["sums", "language", "pendulum"] = "sums"
    model: str = ""  # of a language model: the folder with the checkpoint
    algorithm: Algorithm = "grpo"
    optimizer: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    lr: float = 3e-6
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9  # of SGD
    masters: Masters = "fp32"  # bf16: weights and Adam's averages; rounded: only weights, after each step
    warm_up: int = 20  # steps
    delay: int = 0  # batches by which the weights of rollouts lag
    updates: int = 1  # optimizer steps on a batch
    shape: PolicyShape = SHIPPED
    prompts: int = 32  # per batch
    group: int = 16  # completions per prompt
    steps: int = 200  # of the optimizer
    device: str = "cpu"
    pretraining: int = 4000  # at most this number of steps, for shapes that are not shipped

    @property
    def file_name(self) -> str:
        kept = "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in self.name)
        return "-".join(part for part in kept.split("-") if part)

    def to_json(self) -> dict[str, Any]:
        """The arm, from JSON."""
        fields: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return fields


@dataclass(frozen=True)
class Row:
    """Published figures, under the same column names as ours."""

    name: str
    source: str
    figures: Mapping[str, float | str]  # a range is text
    beside: str = ""  # the arm under which it is shown


@dataclass(frozen=True)
class Experiment:
    """A question, the arms that answer it, and what was published."""

    name: str
    question: str
    arms: tuple[Arm, ...]
    published: tuple[Row, ...] = ()
    differs: str = ""  # why ours differ from the published figures
    seeds: tuple[int, ...] = (0, 1, 2)
    tables: tuple[str, ...] = field(default=("windows", "profile", "dtypes", "changes"))

    def with_arms(self, **changes: Any) -> "Experiment":
        """The same, with some fields of every arm changed."""
        return replace(self, arms=tuple(replace(arm, **changes) for arm in self.arms))

    def save(self, folder: Path) -> None:
        """Save the configuration, so that it can be run again, and its pages written."""
        (folder / CONFIG).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Experiment":
        """Load what `save` wrote."""
        fields = json.loads((folder / CONFIG).read_text())
        arms = tuple(
            Arm(**{**arm, "betas": tuple(arm["betas"]), "shape": PolicyShape(**arm["shape"])})
            for arm in fields.pop("arms")
        )
        published = tuple(Row(**row) for row in fields.pop("published"))
        seeds, tables = tuple(fields.pop("seeds")), tuple(fields.pop("tables"))
        return cls(**fields, arms=arms, published=published, seeds=seeds, tables=tables)
