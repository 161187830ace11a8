"""Trainers for tests of rounds: tiny models, a ledger of where every update went, and processes forked from one zygote.

A ledger follows one trainer by what it sees at the border of the exchange. For every entry, what the inner steps moved
must be what rounds took of it, wherever they were decided, plus what the trainer still holds.
"""

import atexit
import hashlib
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pulsesync.loco import DDP, DiLoCo, GroupExchange, Nesterov, PulseLoCo, RoundReport, StoreExchange
from pulsesync.store import MemoryStore, Store

KINDS: dict[str, Any] = {"DiLoCo": DiLoCo, "PulseLoCo": PulseLoCo, "DDP": DDP}
GROUP_TIMEOUT_S = 10
TOLERANCE = 1e-5  # of a ledger: FP32 sums of a few dozen updates
PROCESS_S = 45  # after which processes that still run are ended, and the test fails
SHAPES = {"embed": (16, 8), "layer.weight": (9, 11), "norm": (7,), "scale": ()}
Took = set[tuple[int, int, str]]  # fragment, round, payload


class Weights(torch.nn.Module):
    """Parameters by name, and nothing to do with them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, shape in (shapes or SHAPES).items():
            values = np.asarray(0.02 * rng.standard_normal(shape), np.float32)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.from_numpy(values)))


def flat(module: Any) -> np.ndarray:
    return np.concatenate([p.detach().reshape(-1).numpy() for p in module.parameters()])


def same(a: Any, b: Any) -> bool:
    """Whether FP32 values are the same bits."""
    a, b = (np.ascontiguousarray(v, np.float32).reshape(-1).view(np.uint32) for v in (a, b))
    return bool(np.array_equal(a, b))


class Ledger:
    """What a trainer's inner steps moved, and every update that it offered."""

    def __init__(self) -> None:
        self.moved: list[np.ndarray] = []
        self.letters: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # id -> sent, kept
        self.took: Took = set()
        self.initial: list[np.ndarray] = []

    def balance(self, loco: Any, took: Took) -> float:
        """How far, at most, an entry is from being accounted for, as a share of the furthest that one was moved."""
        state = loco.state_dict()
        worst = 0.0
        for fragment, shared in enumerate(state["shared"]):
            names = {payload for f, _, payload in took if f == fragment}
            gone = sum((self.letters[i][0] for i in names if i in self.letters), np.zeros(len(shared["theta"])))
            private = state["private"]
            held = private["residuals"][fragment].double().numpy() + (
                shared["theta"].double().numpy() - private["weights"][fragment].double().numpy()
            )
            start = self.initial[fragment] if self.initial else 0.0
            off = np.abs(start + self.moved[fragment] - gone - held).max(initial=0.0)
            worst = max(worst, float(off / max(np.abs(self.moved[fragment]).max(initial=0.0), 1e-9)))
        return worst


class Watched:
    """An exchange that writes into a ledger what passes through it."""

    def __init__(self, exchange: Any, ledger: Ledger) -> None:
        self.inner, self.ledger = exchange, ledger
        self.loco: Any = None

    def __getattr__(self, name: str) -> Any:  # what is not watched
        return getattr(self.inner, name)

    def join(self, mine: Any, about: str) -> Any:
        found = self.inner.join(mine, about)
        for fragment, shared in enumerate(found):
            self.ledger.took |= {(fragment, part.round, part.payload) for part in shared.parts.values()}
        return found

    def prepare(self, coder: Any, split: Any) -> Any:
        letter = self.inner.prepare(coder, split)
        whole = np.zeros(split.sent.size)
        whole[split.sent.positions] = split.sent.values
        self.ledger.letters[letter.id] = whole, split.kept.copy()
        if self.loco is not None:  # all that it has to tell is sent or kept, bit for bit
            state, f = self.loco.state_dict(), coder.fragment
            private = state["private"]
            s = (private["residuals"][f] + (state["shared"][f]["theta"] - private["weights"][f])).numpy()
            both = split.kept.copy()
            both[split.sent.positions] = split.sent.values + split.kept[split.sent.positions]
            assert same(both, s), "sent + kept is not the update"
        return letter

    def confirm(self, coder: Any, outcome: Any, after: Any) -> None:
        self.inner.confirm(coder, outcome, after)
        self._took(coder, outcome)

    def missed(self, coder: Any, size: int) -> Any:
        outcome = self.inner.missed(coder, size)
        if outcome is not None:
            self._took(coder, outcome)
        return outcome

    def _took(self, coder: Any, outcome: Any) -> None:
        self.ledger.took |= {(coder.fragment, coder.round, payload) for payload in outcome.members.values()}


class Trainer:
    """One trainer, whose gradients are a function of who it is and of how many steps it took."""

    def __init__(
        self, exchange: Any, who: int, kind: str = "PulseLoCo", *, seed: int = 0, lr: float = 1e-3, pieces: int = 1,
        shapes: dict[str, tuple[int, ...]] | None = None, watch: bool = True, model: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.who, self.taken = who, 0
        self.modules = [model or Weights(shapes, seed)] if pieces == 1 else [
            Weights(shapes, seed + i) for i in range(pieces)
        ]  # fmt: skip
        self.parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=0.5)
        self.ledger = Ledger()
        self.ledger.moved = [np.zeros(flat(m).size) for m in self.modules]
        self.reports: list[RoundReport] = []
        self.digests: list[tuple[int, int, str]] = []
        options = {"outer": Nesterov(0.7, 0.9), "sync_every": 2 * pieces, **options}
        self.exchange = Watched(exchange, self.ledger) if watch else exchange
        model = self.modules[0] if pieces == 1 else self.modules
        self.loco = KINDS[kind](model, self.optimizer, exchange=self.exchange, on_round=self._on_round, **options)
        if watch and not options.get("delay") and kind != "DDP":
            self.exchange.loco = self.loco
        self._before: list[np.ndarray] = []
        self.optimizer.register_step_pre_hook(lambda *_: self._look())
        self.optimizer.register_step_post_hook(lambda *_: self._count())

    def _look(self) -> None:
        self._before = [flat(m).astype(np.float64) for m in self.modules]

    def _count(self) -> None:
        for i, m in enumerate(self.modules):
            with np.errstate(invalid="ignore"):
                self.ledger.moved[i] += self._before[i] - flat(m)

    def _on_round(self, report: RoundReport) -> None:
        self.reports.append(report)
        self.digests.append((report.fragment, report.round, report.digest))

    def __enter__(self) -> "Trainer":
        self.loco.__enter__()
        return self

    def __exit__(self, *what: object) -> None:
        self.loco.__exit__(*what)

    def gradients(self) -> None:
        rng = np.random.default_rng([self.who, self.taken])
        for p in self.parameters:
            p.grad = torch.from_numpy(np.asarray(rng.standard_normal(p.shape), np.float32))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.gradients()
            self.taken += 1
            self.optimizer.step()

    def rejoin(self, exchange: Any) -> None:
        watched = Watched(exchange, self.ledger)
        watched.loco = self.exchange.loco
        self.exchange = watched
        self.loco.rejoin(watched)

    def save(self, path: Path) -> None:
        saved = {"loco": self.loco.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken}
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.loco.load_state_dict(saved["loco"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.taken = saved["taken"]
        private = saved["loco"]["private"]
        if private["trainer"] == self.exchange.trainer:
            self.ledger.initial = [
                (e.double() + (shared["theta"].double() - x.double())).numpy()
                for e, x, shared in zip(private["residuals"], private["weights"], saved["loco"]["shared"], strict=True)
            ]

    @property
    def residual(self) -> np.ndarray:
        return self.loco.state_dict()["private"]["residuals"][0].numpy()

    @property
    def theta(self) -> np.ndarray:
        return self.loco.state_dict()["shared"][0]["theta"].numpy()

    @property
    def weights(self) -> np.ndarray:
        return flat(self.modules[0])

    @property
    def update(self) -> np.ndarray:
        """What it would tell now."""
        return self.residual + (self.theta - self.weights)

    def everything(self) -> str:
        """A hash of all that a failed round must leave as it was, but for the inner optimizer's own steps."""
        state = self.loco.state_dict()
        h = hashlib.sha256(repr([(s["round"], s["parts"]) for s in state["shared"]]).encode())
        for shared, residual in zip(state["shared"], state["private"]["residuals"], strict=True):
            for values in (shared["theta"], shared["momentum"], residual):
                h.update(values.numpy().tobytes())
        return h.hexdigest()


def settle(trainers: Iterable[Trainer], tolerance: float = TOLERANCE) -> None:
    """All hold the same shared state, and nothing any of them moved was lost or counted twice."""
    all_ = list(trainers)
    took: Took = set().union(*(t.ledger.took for t in all_))
    assert len({tuple(t.loco.digests) for t in all_}) == 1
    for t in all_:
        assert t.ledger.balance(t.loco, took) < tolerance


# Meeting in a store


def meet(store: Store | str, name: str, trainers: int, **options: Any) -> StoreExchange:
    options = {"deadline_s": 20.0, "patience_s": 20.0, "poll_s": 0.0005, **options}
    return StoreExchange(store, name, trainers=trainers, **options)


def alone(**options: Any) -> StoreExchange:
    return meet(MemoryStore(), "a", 1, **options)


class Turns:
    """A clock that only moves when somebody sleeps, and what happens meanwhile: no threads, no waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile: list[Callable[[], None]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        else:
            self.now += max(seconds, 0.1)

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "clock": self.clock,
            "sleep": self.sleep,
            "poll_s": 0.1,
            "deadline_s": 10.0,
            "patience_s": 100.0,
            **more,
        }


def together(*calls: Callable[[], Any], timeout_s: float = 40.0) -> list[Any]:
    """Call all at once, in threads; raise what one raises."""
    results: list[Any] = [None] * len(calls)
    faults: list[BaseException] = []

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except BaseException as e:  # noqa: BLE001 - raised again where the threads are waited for
            faults.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if faults:
        raise faults[0]
    assert not any(thread.is_alive() for thread in threads), "somebody hangs"
    return results


# Meeting in a group


@contextmanager
def group(folder: str, name: str, rank: int, size: int) -> Iterator[None]:
    join_group(folder, name, rank, size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def join_group(folder: str, name: str, rank: int, size: int) -> None:
    from datetime import timedelta

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=size,
        timeout=timedelta(seconds=GROUP_TIMEOUT_S),
    )  # fmt: skip


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# Processes


class Fleet:
    """Forks processes from one that has torch loaded, so that each costs milliseconds; ends them all in the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        source = Path(__file__).parents[2]
        path = os.pathsep.join([str(source / "src"), str(source)])
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.loco.fleet"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=source, env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )  # fmt: skip
        assert self.zygote.stdout is not None
        assert self.zygote.stdout.readline() == "ready\n"
        self.count = 0

    def start(self, case: Callable[..., Any], **args: Any) -> tuple[int, Path]:
        """Start a process that calls a test module's function; return its id, and where its result will be."""
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.count += 1
        out = self.folder / f"{case.__name__}-{self.count}"
        module = f"tests.loco.{case.__module__.rpartition('.')[2]}"
        order = {"module": module, "case": case.__name__, "args": args, "out": str(out)}
        self.zygote.stdin.write(json.dumps(order) + "\n")
        self.zygote.stdin.flush()
        return int(self.zygote.stdout.readline()), out

    def run(self, case: Callable[..., Any], ranks: int, killed: Sequence[int] = (), **args: Any) -> list[Any]:
        """Run a function as so many ranks; return what each returned. Those killed, and no others, return nothing."""
        folder = self.folder / f"group-{self.count}"
        folder.mkdir()
        started = [self.start(case, rank=r, size=ranks, folder=str(folder), **args) for r in range(ranks)]
        end = time.monotonic() + PROCESS_S
        while any(alive(pid) for pid, _ in started) and time.monotonic() < end:
            time.sleep(0.005)
        hanging = [pid for pid, _ in started if alive(pid)]
        for pid in hanging:
            os.kill(pid, signal.SIGKILL)
        words = "\n".join(told(out) for _, out in started)
        assert not hanging, f"{len(hanging)} of {ranks} hang\n{words}"
        results = [pickle.loads(out.read_bytes()) if out.exists() else None for _, out in started]
        assert [r for r in range(ranks) if results[r] is None] == list(killed), words
        return results

    def stop(self) -> None:
        os.killpg(self.zygote.pid, signal.SIGKILL)
        self.zygote.communicate()


def told(out: Path) -> str:
    """A process's last words; none, if it was killed before it could say any."""
    errors = out.with_suffix(".err")
    return errors.read_text()[-3000:] if errors.exists() else ""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


_FLEETS: list[Fleet] = []


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """One for all modules of a test process. It ends with it, however that ends: its zygote reads from a pipe."""
    if not _FLEETS:
        _FLEETS.append(Fleet(tmp_path_factory.mktemp("fleet")))
        atexit.register(_FLEETS[0].stop)
    return _FLEETS[0]


def _child(order: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = Path(order["out"])
    with out.with_suffix(".err").open("a") as errors:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)
        try:
            result = getattr(importlib.import_module(order["module"]), order["case"])(**order["args"])
            out.with_suffix(".new").write_bytes(pickle.dumps(result))
            out.with_suffix(".new").rename(out)
        except BaseException:  # noqa: BLE001 - written down, and missed where the result should be
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(5)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are gone at once
    torch.set_num_threads(1)
    assert GroupExchange
    for options in ({}, {"compact": 2}, {"kind": "DiLoCo"}):  # so that every kernel is loaded
        with Trainer(alone(), 0, sync_every=1, **options) as trainer:
            trainer.step(2)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.alarm(PROCESS_S + 10)  # whatever becomes of the test
            _child(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
