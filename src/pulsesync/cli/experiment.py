"""What `pulse study experiment` does: run sweeps, and say what is done."""

from collections.abc import Sequence
from pathlib import Path

from pulsesync.cli.demo import find_model, need_torch
from pulsesync.cli.options import UsageError
from pulsesync.errors import PulseError


def experiment(
    names: Sequence[str],
    *,
    out: Path | None,
    steps: int | None,
    seeds: str,
    model: str,
    device: str,
    jobs: int,
    quick: bool,
) -> int:
    """Run experiments, or list them; exit code 0. Raises: PulseError, if an arm failed; UsageError."""
    need_torch()
    from pulsesync.lab.study.experiments import __main__ as module
    from pulsesync.lab.study.experiments import sweeps

    unknown = [name for name in names if name not in (*sweeps.EXPERIMENTS, "all", "list")]
    if unknown:
        raise UsageError(f"there is no experiment {', '.join(unknown)}: pulse study experiment list shows them")
    try:
        numbers = module.read_seeds(seeds)
    except PulseError as e:
        raise UsageError(str(e)) from e
    module.experiment(
        names or ["list"],
        out=out,
        steps=steps,
        seeds=numbers,
        model=find_model(model),
        device=device,
        jobs=jobs,
        quick=quick,
    )
    return 0
