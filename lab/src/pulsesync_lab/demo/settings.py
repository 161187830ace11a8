"""The settings of a run: given on the command line, saved in the run's folder, read by all its processes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pulsesync.metrics import MetricsExporter, export


@dataclass(frozen=True)
class DemoSettings:
    """All that a run depends on.

    Two runs with equal settings in lock-step yield equal weights, rewards and rollouts.
    """

    steps: int = 100
    workers: int = 2
    seed: int = 0
    lr: float = 6e-5
    prompts: int = 32  # per step
    group: int = 8  # completions per prompt
    shards: int = 4  # pieces of work per step for the workers
    delay: int = 1  # versions that completions may be behind; 0 is lock-step
    publish_every: int = 1  # steps
    sync: Literal["pulse", "full"] = "pulse"
    trainers: int = 1
    sync_every: int = 8  # steps between two rounds of several trainers
    loco: Literal["pulse", "exact", "dense"] = "pulse"  # what they send each other
    store: str = ""  # where the trainer publishes
    read: str = ""  # where workers read, if it is not the same
    link: float | None = None  # bytes a second, from the store to each worker
    model: str = "demo"  # or a folder with a Hugging Face checkpoint
    device: str = "cpu"
    recount_every: int = 5  # versions
    checkpoint_every: int = 5  # steps
    port: int = 0
    secret: str = ""
    metrics: int = 0  # port at which the first trainer exports its metrics, others at those after it; 0: none does

    @property
    def span(self) -> int:
        """Steps between two possible versions: one, or those of a round of several trainers."""
        return self.sync_every if self.trainers > 1 else 1

    def metrics_port(self, role: str) -> int:
        """Return the port of a process: trainers have the first ones, and workers those after them."""
        name, _, number = role.partition("-")
        return self.metrics + (int(number or 0) if name == "trainer" else self.trainers + int(name))

    def export_metrics(self, role: str) -> MetricsExporter | None:
        """Export the metrics of a process until it ends, if that is wanted."""
        return export(self.metrics_port(role)) if self.metrics else None

    def meeting(self, folder: Path) -> str:
        """Where several trainers exchange updates: next to the run's store."""
        own = self.store in ("", str(folder / "store"))
        return str(folder / "meeting") if own else f"{self.store.rstrip('/')}-trainers"

    def save(self, folder: Path) -> None:
        (folder / "settings.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "DemoSettings":
        return cls(**json.loads((folder / "settings.json").read_text()))
