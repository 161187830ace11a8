"""Run arms × seeds, some at a time, each in its own process if there are several; finished recordings are kept."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pulsesync.errors import PulseError
from pulsesync_lab.demo.policy import SHIPPED
from pulsesync_lab.study.experiments import loop, results, sweeps
from pulsesync_lab.study.experiments.arm import Arm, Experiment

Report = Callable[[str], None]


def choose(
    names: Sequence[str],
    *,
    model: str = "demo",
    device: str = "cpu",
    steps: int | None = None,
    seeds: Sequence[int] | None = None,
    quick: bool = False,
) -> list[Experiment]:
    """The requested experiments. Raises: PulseError, if one does not exist."""
    chosen = sweeps.find(names)
    if model != "demo":
        wanted = [one for one in chosen if list(names) != ["all"] or one.name in sweeps.WITH_LANGUAGE]
        chosen = [sweeps.with_model(one, model) for one in wanted]
    if quick:
        chosen = [sweeps.quick(one) for one in chosen]
    if steps is not None:
        chosen = [one.with_arms(steps=steps) for one in chosen]
    if seeds is not None:
        chosen = [replace(one, seeds=tuple(seeds)) for one in chosen]
    return [one.with_arms(device=device) for one in chosen]


def run(experiments: Sequence[Experiment], out: Path, *, jobs: int = 1, report: Report = lambda _: None) -> None:
    """Run what is not finished, and write all pages, also if some arms failed or it was interrupted.

    Raises:
        PulseError: some arms failed (the message has which, and why), or recordings would be replaced by shorter ones.
    """
    _refuse(experiments, out)
    shown = [_with_earlier_seeds(experiment, out / experiment.name) for experiment in experiments]
    for experiment in shown:
        folder = out / experiment.name
        folder.mkdir(parents=True, exist_ok=True)
        experiment.save(folder)
    try:
        failed = _pretrain(experiments, out, jobs, report)
        failed += _work(_todo(experiments, out), jobs, report)
    finally:
        with _undisturbed():
            for experiment in shown:
                results.write_results(experiment, out / experiment.name)
            results.write_index(out)
    if failed:
        raise PulseError(f"{len(failed)} arms failed: {'; '.join(failed)}")


def _refuse(experiments: Sequence[Experiment], out: Path) -> None:
    """Raises: PulseError, if a recording would be replaced by one of fewer steps."""
    each = [(one, arm, seed) for one in experiments for arm in one.arms for seed in one.seeds]
    for experiment, arm, seed in each:
        path = results.path_of(out / experiment.name, arm, seed)
        there = results.read_any(path)
        steps = there.header.facts.get("arm", {}).get("steps", 0) if there else 0
        if steps > arm.steps:
            raise PulseError(f"{path} already has a recording of {steps} steps, not {arm.steps}: give another --out")


def _with_earlier_seeds(experiment: Experiment, folder: Path) -> Experiment:
    """For the pages: recordings of other seeds are shown as well."""
    try:
        earlier = Experiment.load(folder).seeds
    except (OSError, ValueError, TypeError, KeyError):  # there is none, or it is of another version
        earlier = ()
    return replace(experiment, seeds=tuple(sorted({*earlier, *experiment.seeds})))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore interrupts: a second one often follows the first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


Task = tuple[Callable[..., float], tuple[object, ...], str]


def _todo(experiments: Sequence[Experiment], out: Path) -> list[Task]:
    """Arms that have no recording yet, one seed after the other."""
    return [
        (_train, (arm, seed, path, out / "policies"), f"{experiment.name}: {arm.name}, seed {seed}")
        for seed in sorted({seed for experiment in experiments for seed in experiment.seeds})
        for experiment in experiments
        if seed in experiment.seeds
        for arm in experiment.arms
        if results.read(path := results.path_of(out / experiment.name, arm, seed), arm, seed) is None
    ]


def _pretrain(experiments: Sequence[Experiment], out: Path, jobs: int, report: Report) -> list[str]:
    """Make the policies with which arms begin, each once."""
    policies = out / "policies"
    arms = [arm for experiment in experiments for arm in experiment.arms if arm.game == "sums" and arm.shape != SHIPPED]
    wanted = {path: arm for arm in arms if not (path := loop.kept(arm, policies)).exists()}
    return _work([(_begin, (arm, policies), f"pretrained {arm.shape.name}") for arm in wanted.values()], jobs, report)


def _work(tasks: Sequence[Task], jobs: int, report: Report) -> list[str]:
    """Do tasks, reporting each that is done; return what failed, and why."""
    if jobs <= 1 or len(tasks) <= 1:
        done = [_one(task, partial(task[0], *task[1]), report) for task in tasks]
        return [why for why in done if why]
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin_child, initargs=(threads,)) as pool:
        futures = _submit(pool, tasks)
        try:
            done = [_one(futures[future], future.result, report) for future in as_completed(futures)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # tasks that have begun are finished, and kept
            raise
    return [why for why in done if why]


def _begin_child(threads: int) -> None:
    """Leave interrupts to the parent: it starts no more tasks, and those that have begun are finished."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def _submit(pool: Executor, tasks: Sequence[Task]) -> "dict[Future[float], Task]":
    return {pool.submit(task[0], *task[1]): task for task in tasks}


def _one(task: Task, result: Callable[[], float], report: Report) -> str:
    """Wait for one task; return why it failed, if it did: others continue."""
    try:
        seconds = result()
    except Exception as e:  # noqa: BLE001 - whatever it was, the other arms are worth having
        report(f"{task[2]} FAILED: {e!r}")
        return f"{task[2]}: {e!r}"
    report(f"{task[2]}: {seconds:.1f} s")
    return ""


def _train(arm: Arm, seed: int, path: Path, policies: Path) -> float:
    """Record to a temporary name, which is renamed when the recording is complete; return the seconds."""
    begun = time.monotonic()
    unfinished = path.with_name(f"{path.name}.part")
    loop.train(arm, seed, unfinished, policies)
    critic = loop.critic_of(unfinished)
    if critic.exists():
        critic.replace(loop.critic_of(path))
    unfinished.replace(path)
    return time.monotonic() - begun


def _begin(arm: Arm, policies: Path) -> float:
    begun = time.monotonic()
    loop.begin(arm, policies)
    return time.monotonic() - begun
