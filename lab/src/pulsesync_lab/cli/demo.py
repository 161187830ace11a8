"""`pulse demo`: start a run in several processes, show its progress, print a summary, and keep it in a folder.

A run of the demo's own policy ends with a replay of a language model's recorded steps, and both results side by side.
"""

import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Console
from rich.live import Live

from pulsesync.cli.options import Amount, Count, Json, Natural, UsageError, open_place, read_rate
from pulsesync.errors import PulseError
from pulsesync.store import MemoryStore
from pulsesync_lab import contrast
from pulsesync_lab.charts import draw
from pulsesync_lab.demo import plots, view
from pulsesync_lab.demo.replay import RATE, RECORDED, ReplayRun, load
from pulsesync_lab.demo.run import DemoRun
from pulsesync_lab.demo.settings import DemoSettings
from pulsesync_lab.demo.view import Line, RunStory

SMOLLM2 = Path(".models", "smollm2")  # in the current folder
OWN = ("port", "secret", "metrics")  # settings that are new at every start of a run
FILES = "settings.json, steps.jsonl, summary.json, plots.svg"  # what a run leaves in its folder

app = App(name="demo")


@app.default
def demo(
    *,
    steps: Natural = 100,
    workers: Natural = 2,
    seed: Count = 0,
    lr: Amount | None = None,
    prompts: Natural = 32,
    group: Natural = 8,
    delay: Count = 1,
    publish_every: Natural = 1,
    sync: Literal["pulse", "full"] = "pulse",
    trainers: Natural = 1,
    sync_every: Natural = 8,
    loco: Literal["pulse", "exact", "dense"] = "pulse",
    store: str | None = None,
    read: str | None = None,
    link: str | None = None,
    model: str = "demo",
    device: str = "cpu",
    metrics: Count = 0,
    out: Path | None = None,
    recorded: Annotated[bool, Parameter(name="--replay", negative=())] = False,
    as_json: Json = False,
) -> int:
    """Train a small policy by reinforcement, with workers in processes of their own that follow its weights.

    A trainer learns to add by GRPO from what workers generate; workers get its weights only through a store, and verify
    that they are bit for bit what was published. Every step shows the reward, how many BF16 weights changed, the bytes
    that were sent, and the version that each worker has. Any process may be killed: it is started again. Ctrl-C stops
    the run; the same command with --out resumes it. Needs torch: pip install 'pulsesync[torch]'.

    This policy is small and learns at a rate that changes many of its weights in a step. Therefore the recorded steps
    of --replay are played afterwards, for a few seconds, and both results are printed side by side. This is left out
    for runs with --model, --sync full, --trainers, --publish-every, --store, --read or --link.

    With --trainers 4, four trainers learn on their own, each from its own completions, and exchange updates every few
    steps: each sends the others what would change the next forward pass, and keeps the rest in its own weights
    (PULSELoCo). After a round all have the same shared weights, which is checked; the first trainer publishes these,
    and workers follow.

    Args:
        steps: Optimizer steps to take.
        workers: Processes that generate.
        seed: Random seed of prompts and completions.
        lr: AdamW's learning rate; 6e-5 if not given, or 1e-5 for several trainers, because their outer step is seven
            times as long. RL on large models uses 1e-6 to 3e-6, at which this small policy would learn slowly.
        prompts: Prompts in a step, distributed as four pieces of work.
        group: Completions of each prompt.
        delay: Number of versions by which the weights that completions come from may be older than the newest; 0 is
            lock-step, which gives the same weights every time.
        publish_every: Optimizer steps in a version.
        sync: pulse sends what changed; full sends all weights, for comparison.
        trainers: Processes that learn. Each has as many prompts in a step as a single one would have.
        sync_every: Steps that several trainers take between two rounds; --steps is rounded up to whole rounds.
        loco: What trainers send each other: pulse, what the next forward pass sees, in a few bits each; exact, the same
            in FP32; dense, the full update, which is DiLoCo, for comparison.
        store: Where the trainer publishes: a folder, s3://…, gs://…, az://…; a folder in the run's folder if not given.
            Several trainers exchange their updates at a location next to it.
        read: Where workers read, if that is another address: that of pulse serve or pulse relay.
        link: Bandwidth of each worker's link to the store, such as 50mbit; unlimited if not given.
        model: demo; smollm2, which python -m pulsesync_lab.demo.smollm2 .models/smollm2 downloads; or a folder with a
            Hugging Face checkpoint.
        device: Device on which models other than demo compute.
        metrics: Port of 127.0.0.1 at which the trainer exports its metrics for Prometheus; workers have the ports after
            it. 0 exports none.
        out: The run's folder: a new one, or that of a run that was interrupted. If not given, a new folder in runs/,
            named by the time.
        recorded: Publish a recorded GRPO run of SmolLM2-135M at 3e-6 instead of training: no torch, a few seconds.
        as_json: Print one JSON object a step and a summary, for machines.

    Raises:
        UsageError: the options contradict each other, or the run in --out has other settings.
        PulseError: torch is missing, or a worker's weights differ from what was published.
    """
    settings = DemoSettings(
        steps=steps,
        workers=workers,
        seed=seed,
        lr=lr or (6e-5 if trainers == 1 else 1e-5),
        prompts=prompts,
        group=group,
        delay=delay,
        publish_every=publish_every,
        sync=sync,
        trainers=trainers,
        sync_every=sync_every,
        loco=loco,
        store=read_place(store),
        read=read_place(read),
        link=read_link(link),
        model=find_model(model),
        device=device,
        metrics=metrics,
    )
    return (replay if recorded else run)(settings, out, as_json=as_json)


def run(settings: DemoSettings, out: Path | None, *, as_json: bool) -> int:
    """Train with workers that follow; exit code 0. Raises: PulseError, if weights differ from what was published."""
    need_torch()
    settings = check_trainers(settings)
    folder, shown = open_folder(out, settings)
    story, summary = _watch(DemoRun, folder, settings, shown, as_json)
    finish = _contrast if contrast.makes_sense(settings) else _sum_up
    return finish(folder, story, summary, as_json)


def replay(settings: DemoSettings, out: Path | None, *, as_json: bool) -> int:
    """Publish a recorded run again, with workers that follow; exit code 0. Raises: PulseError, as above."""
    if settings.trainers > 1:
        raise UsageError("--replay plays a recorded run of one trainer: leave out --trainers, or leave out --replay")
    if settings.sync != "pulse" or settings.model != "demo":
        raise UsageError(
            "--replay plays a recorded run and trains no model: leave out --sync and --model, or leave out --replay"
        )
    settings = _recorded(settings)
    folder, shown = open_folder(out, settings)
    return _sum_up(folder, *_watch(ReplayRun, folder, settings, shown, as_json), as_json)


@app.command
def pretrain(*, seed: Count = 0, out: Path = Path("policy.safetensors"), as_json: Json = False) -> int:
    """Make the checkpoint that the demo begins with: supervised, until one sum in four is right.

    Args:
        seed: Random seed of weights and sums.
        out: File for the BF16 weights.
        as_json: Print one JSON object at the end, for machines.

    Raises:
        PulseError: torch is missing.
    """
    need_torch()
    from pulsesync_lab.demo import pretrain as work

    progress: Line = {}
    in_place = sys.stdout.isatty() and not as_json

    def show(step: int, loss: float, share: float) -> None:
        progress.update(step=step, loss=loss, right=share)
        if not as_json:
            line = f"step {step}  loss {loss:.4f}  {share:.1%} right"
            print(f"\r{line}" if in_place else line, end="" if in_place else "\n", flush=True)

    policy = work.pretrain(seed, report=show)
    if in_place:
        print()
    out.parent.mkdir(parents=True, exist_ok=True)
    work.save(policy, out)
    if as_json:
        print(json.dumps({"event": "pretrained", "file": str(out), **progress}))
    else:
        print(f"{out}: the BF16 weights, {progress['right']:.1%} of sums right")
    return 0


# Options


def need_torch() -> None:
    """Raises: PulseError, if torch is not installed; it names the extra to install."""
    if find_spec("torch") is None:
        raise PulseError(
            "training needs torch, which is not installed: pip install 'pulsesync[torch]'. pulse demo --replay runs "
            "without it"
        )


def read_place(location: str | None) -> str:
    """Return a location that several processes can share, or an empty text. Raises: UsageError."""
    if location is None:
        return ""
    if isinstance(open_place(location), MemoryStore):
        raise UsageError(
            f"{location} exists in one process only, and the demo has several: give a folder or the address of a store"
        )
    return location


def read_link(text: str | None) -> float | None:
    """Return the bytes per second of a link such as 50mbit. Raises: UsageError."""
    if text is None:
        return None
    return read_rate(text, "--link") / 8


def find_model(name: str) -> str:
    """Return the model for the settings: demo, or a folder with a checkpoint. Raises: UsageError."""
    if name == "demo":
        return name
    folder = SMOLLM2 if name == "smollm2" else Path(name)
    if not folder.is_dir():
        hint = "give demo, smollm2, or a folder with a checkpoint"
        if name == "smollm2":
            command = shlex.join([sys.executable, "-m", "pulsesync_lab.demo.smollm2", str(folder)])
            hint = f"{command} downloads it (93 MB) and needs the packages of pip install 'pulsesync-lab[llm]'"
        raise UsageError(f"--model {name}: there is no folder {folder}; {hint}")
    return str(folder)


def check_trainers(settings: DemoSettings) -> DemoSettings:
    """Return the settings with --steps rounded up to whole rounds of these trainers. Raises: UsageError."""
    if settings.trainers == 1:
        if (settings.sync_every, settings.loco) != (DemoSettings.sync_every, DemoSettings.loco):
            raise UsageError("--sync-every and --loco need several trainers: give --trainers too, such as 4")
        return settings
    if settings.sync != "pulse":
        raise UsageError("--sync full works with a single trainer: leave it out, or leave out --trainers")
    if settings.publish_every > 1:
        raise UsageError(
            "--publish-every works with a single trainer: several publish a version every round, so set the number of "
            "steps in a round with --sync-every"
        )
    steps = -(-settings.steps // settings.sync_every) * settings.sync_every
    if steps != settings.steps:
        rounds = f"{steps // settings.sync_every} rounds of {settings.sync_every}"
        print(
            f"pulse: {steps} steps instead of {settings.steps}, so that training ends with a complete round: {rounds}",
            file=sys.stderr,
        )
    return replace(settings, steps=steps)


def open_folder(out: Path | None, settings: DemoSettings) -> tuple[Path, int]:
    """Return the folder of a run, and how many lines an earlier start has left there.

    Raises:
        UsageError: the folder has something else in it, a run with other settings, or a run that has ended.
    """
    folder = out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if not (folder / "settings.json").exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty, and has no run of the demo in it: give another folder to --out")
        return folder, 0
    if (folder / "summary.json").exists():
        raise UsageError(f"the run in {folder} has ended: give another folder to --out")
    try:
        before = asdict(DemoSettings.load(folder))
    except (TypeError, ValueError) as e:
        raise UsageError(f"the settings in {folder} cannot be read: give another folder to --out") from e
    now = {**asdict(settings), "store": settings.store or str(folder / "store")}
    if others := [name for name in now if name not in OWN and now[name] != before[name]]:
        begun = ", ".join(f"{name.replace('_', ' ')} {before[name]}" for name in others)
        raise UsageError(
            f"the run in {folder} was started with {begun}: give the same options, or another folder to --out"
        )
    steps = folder / "steps.jsonl"
    return folder, steps.read_bytes().count(b"\n") if steps.exists() else 0


# Output


def _watch(
    kind: type[DemoRun],
    folder: Path,
    settings: DemoSettings,
    shown: int,
    as_json: bool,
    event: str = "step",
    resumed_by: Path | None = None,
) -> tuple[RunStory, Line]:
    """Start a run's processes and show its progress until it ends; return its story and its summary.

    Args:
        kind: The class that starts the processes.
        folder: The run's folder.
        settings: The run's settings.
        shown: How many of its lines an earlier start has shown already.
        as_json: Print one JSON object a line.
        event: The `event` of these objects.
        resumed_by: The folder to give to --out after an interruption, if it is not the run's own.
    """
    story = RunStory(settings)
    try:
        with kind(folder, settings) as run, _screen(story, run, as_json, event) as show:
            for number, line in enumerate(run.lines()):
                story.add(line)
                if number >= shown:
                    show(line)
    except KeyboardInterrupt:
        if not as_json:
            step, out = story.last["step"] if story.last else 0, resumed_by or folder
            print(f"pulse: stopped after step {step}; the same command with --out {out} resumes it", file=sys.stderr)
        raise
    recounted = [name for name, process in run.processes.items() if name.isdecimal() and process.returncode == 0]
    summary = story.summary(run.restarts, recounted)
    if (folder / "final.json").exists():  # what the workers reported after the line of the last step was written
        for name, left in json.loads((folder / "final.json").read_text())["workers"].items():
            if name in summary["workers"]:
                summary["workers"][name].update(version=left["version"], recounted=left["version"])
    return story, summary


def _sum_up(folder: Path, story: RunStory, summary: Line, as_json: bool) -> int:
    return _end(folder, story, summary, f"{view.summarize(story, summary)}\n{folder}: {FILES}", as_json)


def _contrast(folder: Path, story: RunStory, summary: Line, as_json: bool) -> int:
    """Replay the recorded steps and print both runs side by side; the summary has the replay under a key of its own."""
    settings = _recorded(DemoSettings(workers=story.settings.workers, metrics=story.settings.metrics))
    if not as_json:
        print(f"\n{view.summarize(story, summary)}\n\n{contrast.announce(settings)}", flush=True)
    place, shown = open_folder(folder / "replay", settings)
    _, replayed = _watch(ReplayRun, place, settings, shown, as_json, event="replay_step", resumed_by=folder)
    summary["in_reach_share"] = contrast.share_in_reach(contrast.policy_weights(), story.settings.lr)
    replayed["in_reach_share"] = contrast.share_in_reach(contrast.recorded_weights(), settings.lr)
    summary["replay"] = replayed
    compared = contrast.compare(summary, story.settings.lr, replayed, settings.lr)
    return _end(folder, story, summary, f"{folder}: {FILES}\n\n{compared}", as_json)


def _end(folder: Path, story: RunStory, summary: Line, text: str, as_json: bool) -> int:
    """Write the summary into the run's folder, and print it or a text."""
    (folder / "plots.svg").write_text(draw(plots.panels(story), f"{folder.name}: {summary['steps']} steps"))
    (folder / "summary.json").write_text(
        json.dumps(summary, indent=1) + "\n"
    )  # written last: it marks the run as ended
    print(json.dumps({"event": "summary", "folder": str(folder), **summary}) if as_json else f"\n{text}")
    return 0


def _recorded(settings: DemoSettings) -> DemoSettings:
    """Return the settings for a replay of the recording, with no more steps than it has."""
    steps = min(settings.steps, len(load(RECORDED)))
    return replace(settings, model=str(RECORDED), steps=steps, lr=RATE)


@contextmanager
def _screen(story: RunStory, run: DemoRun, as_json: bool, event: str) -> Iterator[Callable[[Line], None]]:
    """Yield a function that shows a step: drawn in place on a terminal, otherwise as a line."""
    workers = f"{run.settings.workers} worker{'s' if run.settings.workers > 1 else ''}"
    trainers = "a trainer" if run.settings.trainers == 1 else f"{run.settings.trainers} trainers"
    title = f"{run.folder}: {trainers}, {workers}, {run.settings.store} between them"
    console = Console(highlight=False)
    if as_json:
        yield lambda line: print(json.dumps({"event": event, **line}), flush=True)
    elif sys.stdout.isatty() and not console.is_dumb_terminal:
        first = view.show(story, run.restarts, title)
        with Live(first, console=console, auto_refresh=False, vertical_overflow="visible") as live:
            yield lambda line: live.update(view.show(story, run.restarts, title), refresh=True)
    else:
        print(title, flush=True)
        known: Counter[str] = Counter()

        def show(line: Line) -> None:
            for name in run.restarts - known:
                print(f"{view.title(name)} died and was started again", flush=True)
            known.update(run.restarts - known)
            print(view.plain(story, line), flush=True)

        yield show
