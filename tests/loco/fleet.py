"""Trainers for tests of rounds: tiny models, and a ledger of where every update went.

A ledger follows one trainer by what it sees at the border of the exchange. For every entry, what the inner steps moved
must be what rounds took of it, wherever they were decided, plus what the trainer still holds. With one shared momentum:

    moved = taken + e + (theta − x)

With a momentum m of the trainer's own, an update of delta moves weights by reach · delta in the end, reach =
lr / (1 − mu), and m is what is still to come of it. A round makes m' = mu m + delta and e' = e + u − taken, with
u = lr (delta + mu m') for Nesterov's and lr m' without. Then e + c m grows by reach · delta − taken in every round,
if c = lr mu² / (1 − mu) for Nesterov's and lr mu / (1 − mu) without, so that with z = theta − e

    reach · moved = taken + e + c m + reach (z − x)

whichever rounds took something, were late, failed, were tried again or were only heard of. A blend is not in it.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pulsesync.loco import DDP, SGD, DiLoCo, Nesterov, PublishedPulseLoCo, PulseLoCo, RoundReport, StoreExchange
from pulsesync.loco.outer_step import LARGEST_UPDATE
from pulsesync.store import MemoryStore, Store
from tests.loco import reference

KINDS: dict[str, Any] = {"DiLoCo": DiLoCo, "PulseLoCo": PulseLoCo, "PublishedPulseLoCo": PublishedPulseLoCo, "DDP": DDP}
TOLERANCE = 1e-5  # of a ledger: FP32 sums of a few dozen updates
SHAPES = {"embed": (16, 8), "layer.weight": (9, 11), "norm": (7,), "scale": ()}
Took = set[tuple[int, int, str]]  # fragment, round, payload


def plain_gate(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a trainer whose gate rounds nothing and reaches no further than an update does, if they do not say."""
    return {"compact": None, "reach": 1.0, **options} if kind is PulseLoCo else options


class Weights(torch.nn.Module):
    """Parameters by name, and nothing to do with them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        for name, shape in (shapes or SHAPES).items():
            values = np.asarray(0.02 * rng.standard_normal(shape), np.float32)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(torch.from_numpy(values)))


def flat(module: Any) -> np.ndarray:
    return np.concatenate([p.detach().reshape(-1).cpu().numpy() for p in module.parameters()])


def same(a: Any, b: Any) -> bool:
    """Whether FP32 values are the same bits."""
    a, b = (np.ascontiguousarray(v, np.float32).reshape(-1).view(np.uint32) for v in (a, b))
    return bool(np.array_equal(a, b))


def first_weights(state: Any, fragment: int) -> np.ndarray:
    """Where a trainer with this state began its round."""
    theta: np.ndarray = state["shared"][fragment]["theta"].numpy()
    return theta - state["private"]["residuals"][fragment].numpy() if state["private"]["momenta"] else theta


def update_of(state: Any, fragment: int, outer: SGD) -> list[np.ndarray]:
    """The update that a trainer with this state would send now, and its next momentum if it has one."""
    theta, private = state["shared"][fragment]["theta"].numpy(), state["private"]
    e, x = private["residuals"][fragment].numpy(), private["weights"][fragment].numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        if not private["momenta"]:
            return [e + (theta - x)]
        return reference.advance(theta, e, private["momenta"][fragment].numpy(), x, outer)


@dataclass(frozen=True, eq=False)
class Offer:
    """An update that was offered: what was sent of it, and the trainer's residual and momentum once a round uses it."""

    sent: np.ndarray
    residual: np.ndarray | None = None  # None: not known, because training continued meanwhile
    momentum: np.ndarray | None = None


class Ledger:
    """What a trainer's inner steps moved, and every update that it offered."""

    def __init__(self, outer: SGD) -> None:
        self.outer = outer
        self.moved: list[np.ndarray] = []
        self.offers: dict[str, Offer] = {}  # by the payload's id
        self.took: Took = set()
        self.initial: list[np.ndarray] = []

    def reach(self, state: Any) -> float:
        """How far an inner step moves the weights in the end."""
        return self.outer.reach if state["private"]["momenta"] else 1.0

    def holds(self, state: Any, fragment: int) -> np.ndarray:
        """All that a trainer has not sent yet, including what its momentum will still add."""
        private, outer = state["private"], self.outer
        x = private["weights"][fragment].double().numpy()
        held: np.ndarray = private["residuals"][fragment].double().numpy()
        held = held + self.reach(state) * (first_weights(state, fragment) - x)
        if private["momenta"]:
            c = outer.lr * outer.momentum ** (2 if outer.nesterov else 1) / (1 - outer.momentum)
            held = held + c * private["momenta"][fragment].double().numpy()
        return held

    def balance(self, loco: Any, took: Took) -> float:
        """The largest unaccounted difference of any entry, as a fraction of the largest movement of any entry."""
        state = loco.state_dict()
        worst = 0.0
        for fragment, shared in enumerate(state["shared"]):
            names = {payload for f, _, payload in took if f == fragment}
            gone = sum((self.offers[i].sent for i in names if i in self.offers), np.zeros(len(shared["theta"])))
            start = self.initial[fragment] if self.initial else 0.0
            moved = self.reach(state) * self.moved[fragment]
            off = np.abs(start + moved - gone - self.holds(state, fragment)).max(initial=0.0)
            worst = max(worst, float(off / max(np.abs(moved).max(initial=0.0), 1e-9)))
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

    def prepare(self, coder: Any, update: Any) -> Any:
        encoded = self.inner.prepare(coder, update)
        if encoded.id in self.ledger.offers:
            return encoded  # an update that is offered again
        sent = np.zeros(update.sent.size, np.float32)
        sent[update.sent.positions] = update.sent.values
        offer = Offer(sent)
        if self.loco is not None:  # what is sent and what is left are the whole update, bit for bit
            s, *momentum = update_of(self.loco.state_dict(), coder.fragment, self.ledger.outer)
            offer = Offer(sent, s - sent, *momentum)
            assert same(sent + (s - sent), s + np.float32(0)), "sent + kept is not the update"
            assert update.unit is not None or same(sent[update.sent.positions], s[update.sent.positions])
        self.ledger.offers[encoded.id] = offer
        return encoded

    def confirm(self, coder: Any, outcome: Any, after: Any) -> None:
        self.inner.confirm(coder, outcome, after)
        self._took(coder, outcome)

    def missed(self, coder: Any, size: int) -> Any:
        outcome = self.inner.missed(coder, size)
        if outcome is not None:
            self._took(coder, outcome)
        return outcome

    def _took(self, coder: Any, outcome: Any) -> None:
        if (np.abs(outcome.total) <= LARGEST_UPDATE * len(outcome.members)).all():  # otherwise the round is empty
            self.ledger.took |= {(coder.fragment, coder.round, payload) for payload in outcome.members.values()}


class Trainer:
    """One trainer, whose gradients are a function of who it is and of how many steps it took."""

    def __init__(
        self,
        exchange: Any,
        who: int,
        kind: str = "PulseLoCo",
        *,
        seed: int = 0,
        lr: float = 1e-3,
        pieces: int = 1,
        shapes: dict[str, tuple[int, ...]] | None = None,
        watch: bool = True,
        model: Any = None,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        self.who, self.taken = who, 0
        self.modules = (
            [model or Weights(shapes, seed)] if pieces == 1 else [Weights(shapes, seed + i) for i in range(pieces)]
        )
        for module in self.modules:
            module.to(device)
        self.parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=lr, momentum=0.5)
        options = {"outer": Nesterov(0.7, 0.9), "sync_every": 2 * pieces, **options}
        options = plain_gate(KINDS[kind], options)
        self.ledger = Ledger(options["outer"])
        self.ledger.moved = [np.zeros(flat(m).size) for m in self.modules]
        self.reports: list[RoundReport] = []
        self.digests: list[tuple[int, int, str]] = []
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
        if not self.taken:  # a joiner begins with a momentum
            state = self.loco.state_dict()
            self.ledger.initial = [self.ledger.holds(state, i) for i in range(len(self.modules))]
        return self

    def __exit__(self, *what: object) -> None:
        self.loco.__exit__(*what)

    def gradients(self) -> None:
        rng = np.random.default_rng([self.who, self.taken])
        for p in self.parameters:
            p.grad = torch.from_numpy(np.asarray(rng.standard_normal(p.shape), np.float32)).to(p.device)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.gradients()
            self.taken += 1
            self.optimizer.step()

    def diverge(self, by: float = 1.75e38) -> None:
        """Let its update have one value that is finite, also 1.9 times as Nesterov's has it; the sum of two is not."""
        with torch.no_grad():
            self.parameters[2][0] -= by

    def rejoin(self, exchange: Any) -> None:
        watched = Watched(exchange, self.ledger)
        watched.loco = self.exchange.loco
        self.exchange = watched
        self.loco.rejoin(watched)

    def save(self, path: Path) -> None:
        saved = {
            "loco": self.loco.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "taken": self.taken,
            "everything": self.everything(),
        }
        torch.save(saved, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)

    def load(self, path: Path) -> None:
        saved = torch.load(path, weights_only=True)
        self.loco.load_state_dict(saved["loco"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.taken = saved["taken"]
        private = saved["loco"]["private"]
        if private["trainer"] == self.exchange.trainer:
            assert self.everything() == saved["everything"]
            assert all(same(x, flat(m)) for x, m in zip(private["weights"], self.modules, strict=True))
            self.ledger.initial = [self.ledger.holds(saved["loco"], i) for i in range(len(self.modules))]

    @property
    def residual(self) -> np.ndarray:
        values: np.ndarray = self.loco.state_dict()["private"]["residuals"][0].numpy()
        return values

    @property
    def momentum(self) -> np.ndarray:
        """Its own."""
        values: np.ndarray = self.loco.state_dict()["private"]["momenta"][0].numpy()
        return values

    @property
    def theta(self) -> np.ndarray:
        values: np.ndarray = self.loco.state_dict()["shared"][0]["theta"].numpy()
        return values

    @property
    def trend(self) -> np.ndarray:
        values: np.ndarray = self.loco.state_dict()["shared"][0]["trend"].numpy()
        return values

    @property
    def start(self) -> np.ndarray:
        """Where it begins a round: z for PULSELoCo, and theta for the others."""
        return first_weights(self.loco.state_dict(), 0)

    @property
    def weights(self) -> np.ndarray:
        return flat(self.modules[0])

    @property
    def update(self) -> np.ndarray:
        """The update that it would send now."""
        return update_of(self.loco.state_dict(), 0, self.ledger.outer)[0]

    @property
    def next_momentum(self) -> np.ndarray:
        """What its own momentum would be after a round now."""
        return update_of(self.loco.state_dict(), 0, self.ledger.outer)[1]

    def everything(self) -> str:
        """A hash of all that a failed round must leave as it was, but for the inner optimizer's own steps."""
        state = self.loco.state_dict()
        h = hashlib.sha256(repr([(s["round"], s["parts"]) for s in state["shared"]]).encode())
        for shared, residual in zip(state["shared"], state["private"]["residuals"], strict=True):
            for values in (shared["theta"], shared["trend"], residual):
                h.update(values.numpy().tobytes())
        for momentum in state["private"]["momenta"]:
            h.update(momentum.numpy().tobytes())
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
    """An exchange through a store. Options may have a `clock` and a `sleep` of its own."""
    options = {"deadline_s": 20.0, "patience_s": 20.0, "poll_s": 0.0005, **options}
    replaced = {f"_{key}": options.pop(key) for key in ("clock", "sleep") if key in options}
    exchange = StoreExchange(store, name, trainers=trainers, **options)
    vars(exchange).update(replaced)
    return exchange


def alone(**options: Any) -> StoreExchange:
    return meet(MemoryStore(), "a", 1, **options)


class Turns:
    """A clock that only advances when a trainer sleeps, and calls to make meanwhile: no threads, no waiting."""

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
    """Make all calls at the same time, in threads; raise the first exception of any."""
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
    assert not any(thread.is_alive() for thread in threads), "a call did not return within the timeout"
    return results


def load() -> None:
    """Load every kernel that rounds use."""
    choices: list[dict[str, Any]] = [{}, {"compact": 2}, {"kind": "PublishedPulseLoCo"}, {"kind": "DiLoCo"}]
    for options in choices:
        with Trainer(alone(), 0, sync_every=1, **options) as trainer:
            trainer.step(2)
