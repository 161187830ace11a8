"""What `pulse study experiment` does: run sweeps, and say what is done."""

from collections.abc import Sequence
from pathlib import Path

from pulsesync.cli.demo import find_model, need_torch
from pulsesync.cli.options import UsageError


def experiment(
    names: Sequence[str], *, out: Path, steps: int | None, seeds: str, model: str, device: str, jobs: int, quick: bool
) -> int:
    """Run experiments, or list them; exit code 0. Raises: PulseError, if an arm failed; UsageError."""
    need_torch()
    from pulsesync.study.experiments import runner
    from pulsesync.study.experiments.sweeps import EXPERIMENTS

    if not names or list(names) == ["list"]:
        for one in EXPERIMENTS.values():
            print(f"{one.name:10}{len(one.arms):3} arms  {one.question}")
        return 0
    unknown = [name for name in names if name not in (*EXPERIMENTS, "all")]
    if unknown:
        raise UsageError(f"there is no experiment {', '.join(unknown)}: pulse study experiment list shows them")
    numbers = read_seeds(seeds) if seeds else None
    chosen = runner.choose(
        names, model=find_model(model), device=device, steps=steps, seeds=numbers, quick=quick
    )  # fmt: skip
    runner.run(chosen, out, jobs=jobs, tell=lambda line: print(line, flush=True))
    print(out / "results.md")
    return 0


def read_seeds(text: str) -> list[int]:
    """Seeds such as 0,1,2. Raises: UsageError."""
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError as e:
        raise UsageError(f"--seeds {text}: give them as 0,1,2") from e
