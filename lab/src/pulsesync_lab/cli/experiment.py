"""`pulse study experiment`: run sweeps, and list what is finished."""

from pathlib import Path

from pulsesync.cli.options import Flag, Natural, UsageError
from pulsesync.errors import PulseError


def experiment(
    *names: str,
    out: Path | None = None,
    steps: Natural | None = None,
    seeds: str = "",
    model: str = "demo",
    device: str = "cpu",
    jobs: Natural = 1,
    quick: Flag = False,
) -> int:
    """Run the sweeps of the papers: learning rate, windows, delay, scale, optimizer, masters, warm-up and others.

    Every arm and seed produces a recording, which pulse study shows; every experiment produces a page that compares its
    results with the published figures; results.md is an index of all pages. What is finished is not run again, and not
    replaced by a run with fewer steps. Needs torch: pip install 'pulsesync[torch]'.

    Args:
        names: Names of experiments, or all; list shows the names.
        out: Folder for recordings and pages; experiments if not given, or experiments-quick with --quick.
        steps: Optimizer steps of every arm, instead of the arm's own number.
        seeds: Random seeds, separated by commas; 0,1,2 if not given.
        model: demo; smollm2, which python -m pulsesync_lab.demo.smollm2 .models/smollm2 downloads; or a folder with a
            Hugging Face checkpoint.
        device: Where policies compute: cpu or cuda.
        jobs: Number of arms to run at the same time, each in a process of its own.
        quick: Run every arm with a few small steps, to see that it works.

    Raises:
        UsageError: there is no such experiment or model.
        PulseError: an arm failed, or torch is missing.
    """
    from pulsesync_lab.cli.demo import find_model, need_torch

    need_torch()
    from pulsesync_lab.study.experiments import __main__ as module
    from pulsesync_lab.study.experiments import sweeps

    unknown = [name for name in names if name not in (*sweeps.EXPERIMENTS, "all", "list")]
    if unknown:
        raise UsageError(f"there is no experiment {', '.join(unknown)}: pulse study experiment list shows the names")
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
