"""Several trainers in one process, taking turns: what the benchmarks of PULSELoCo share.

The trainers are as real as in a run across processes (each has its own optimizer state, its own rollouts and its own
residual, and what they exchange goes through the library's gate, coder and exchange); only the transport is a list in
memory. Rollouts of a round are generated with the BF16 values of the round's shared weights, as workers would.
"""

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pulsesync.lab.demo.game import Game
from pulsesync.lab.demo.grpo import Rollouts
from pulsesync.loco.gate import F32, DenseGate, GateRule, SparseVector, SplitUpdate, VisibilityGate, update
from pulsesync.loco.group import GroupExchange
from pulsesync.loco.outer import SGD, aggregate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, SharedState


@dataclass(frozen=True)
class NoFeedback:
    """The gate without a residual: what does not fire is lost."""

    dense = False

    def split(self, theta: F32, s: F32) -> SplitUpdate:
        sent = VisibilityGate().split(theta, s).sent
        only = np.zeros_like(s)
        sent.add_to(only)
        return SplitUpdate(sent, only)


class Chosen:
    """A number of entries, the largest or any, with error feedback: as many as a budget of bytes pays for."""

    dense = False

    def __init__(self, largest: bool, seed: int) -> None:
        self.largest, self.count, self._random = largest, 1, np.random.default_rng(seed)

    def split(self, theta: F32, s: F32) -> SplitUpdate:
        count = min(max(1, self.count), s.size)
        if self.largest:
            positions = np.sort(np.argpartition(np.abs(s), s.size - count)[s.size - count :])
        else:
            positions = np.sort(self._random.choice(s.size, count, replace=False, shuffle=False))
        positions = positions[s[positions] != 0]
        return SplitUpdate(SparseVector(s.size, positions, s[positions]), s)


class Fleet:
    """Trainers of one policy, their shared state, and rounds between them."""

    def __init__(
        self,
        game: Game,
        *,
        trainers: int,
        sync_every: int,
        lr: float,
        outer: SGD,
        prompts: int,
        group: int,
        seed: int,
        forward: str = "FP32",
    ) -> None:
        self.game, self.trainers, self.sync_every, self.outer = game, trainers, sync_every, outer
        self.prompts, self.group, self.seed = prompts, group, seed
        self.policy = game.policy()
        self._weights = list(self.policy.parameters())
        self.optimizers = [torch.optim.AdamW(self._weights, lr=lr, weight_decay=0.0) for _ in range(trainers)]
        if forward == "BF16":
            for optimizer in self.optimizers:
                optimizer.register_step_pre_hook(lambda *_: self.write(self._masters))
        self._masters = theta = self.read()
        self.forward = forward
        self.shared = SharedState("0" * 64, theta, np.zeros_like(theta))
        self.residuals = [np.zeros_like(theta) for _ in range(trainers)]
        self.rewards: list[float] = []

    def read(self) -> F32:
        flat = torch.cat([weight.detach().reshape(-1) for weight in self._weights])
        return np.array(flat.cpu().numpy(), np.float32)

    def write(self, values: F32, as_workers: bool = False) -> None:
        flat = torch.from_numpy(values).to(self._weights[0].device)
        if as_workers:
            flat = flat.bfloat16().float()
        with torch.no_grad():
            at = 0
            for weight in self._weights:
                weight.copy_(flat[at : at + weight.numel()].view(weight.shape))
                at += weight.numel()

    def play(self, trainer: int, steps: int, number: int) -> Rollouts:
        """Rollouts for so many steps of a trainer, by the weights that are in the policy."""
        seed = (self.seed * 1_000_003 + number) * 1009 + trainer
        return self.game.play(self.policy, self.prompts * steps, seed)

    def evaluate(self, prompts: int) -> float:
        """The mean reward on prompts that are the same for everybody."""
        self.write(self.shared.theta, as_workers=True)
        return float(self.game.play(self.policy, prompts, 987_654_321).rewards.mean())

    def learn(self, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> None:
        """Take a step: gradients at the weights, or at their BF16 values, as autocast has them; moves the masters."""
        if self.forward == "BF16":
            self._masters = self.read()
            self.write(self._masters, as_workers=True)
        self.game.learn(self.policy, optimizer, rollouts)

    def work(self) -> list[F32]:
        """Let every trainer take its steps; return their updates, residuals included."""
        self.write(self.shared.theta, as_workers=True)
        played = [self.play(r, self.sync_every, self.shared.round) for r in range(self.trainers)]
        self.rewards.append(float(torch.stack([p.rewards.mean() for p in played]).mean()))
        out = []
        for optimizer, rollouts, residual in zip(self.optimizers, played, self.residuals, strict=True):
            self.write(self.shared.theta)
            rows = self.prompts * self.group
            for step in range(self.sync_every):
                self.learn(optimizer, _rows(rollouts, step * rows, (step + 1) * rows))
            out.append(update(self.shared.theta, self.read(), residual))
        return out

    def work_together(self) -> None:
        """The same number of steps with gradients averaged at each: one large batch, rollouts of the same moment."""
        gathered = []
        for step in range(self.sync_every):
            self.write(self.shared.theta, as_workers=True)
            number = self.shared.round * self.sync_every + step
            played = Rollouts.join([self.play(r, 1, number) for r in range(self.trainers)])
            gathered.append(float(played.rewards.mean()))
            self.write(self.shared.theta)
            self.learn(self.optimizers[0], played)
            self.shared = SharedState(self.shared.layout, self.read(), self.shared.momentum, self.shared.round)
        self.rewards.append(float(np.mean(gathered)))
        self.shared = SharedState(self.shared.layout, self.shared.theta, self.shared.momentum, self.shared.round + 1)

    def coder(self, rule: GateRule) -> Coder:
        described = None if rule.dense else describe(self.shared.theta, self.shared.momentum)
        return Coder(0, self.shared.round + 1, self.shared.digest, described)

    def commit(self, splits: list[SplitUpdate]) -> None:
        """Add up and move on, as every trainer would."""
        total = aggregate((split.sent for split in splits), self.shared.theta.size)
        members = {f"{r:05d}": "" for r in range(self.trainers)}
        self.shared = self.shared.after(Outcome(members, total), self.outer)
        self.residuals = [split.kept for split in splits]


def _rows(rollouts: Rollouts, begin: int, end: int) -> Rollouts:
    return Rollouts(rollouts.tokens[begin:end], rollouts.log_probabilities[begin:end], rollouts.rewards[begin:end])


# What an exchange of these updates sends


class _ThreadTeam:
    """Stands in for `Collective` between threads; it counts as that does."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._board, self._barrier = board, barrier
        self.sent_bytes = self.received_bytes = 0

    def _passed(self, thing: Any) -> list[Any]:
        self._board[self.rank] = thing
        self._barrier.wait()
        got = list(self._board)
        self._barrier.wait()
        return got

    def swap(self, outgoing: Any, most: int) -> list[bytes]:
        self.sent_bytes += 8 * self.size * (self.size - 1)  # the lengths go first
        self.received_bytes += 8 * self.size * (self.size - 1)
        coming = [b"" if r == self.rank else row[self.rank] for r, row in enumerate(self._passed(list(outgoing)))]
        self.sent_bytes += sum(len(data) for r, data in enumerate(outgoing) if r != self.rank)
        self.received_bytes += sum(map(len, coming))
        return coming

    def gather_rows(self, row: Any) -> list[Any]:
        self.sent_bytes += (self.size - 1) * row.nbytes
        self.received_bytes += (self.size - 1) * row.nbytes
        return self._passed(row)


class _ThreadGroup(GroupExchange):
    """The exchange of a process group, between threads: all of its code but the collectives."""

    def __init__(self, rank: int, size: int, reduce: Any, board: list[Any], barrier: threading.Barrier) -> None:
        self._rank, self._size, self._reduce = rank, size, reduce
        self._names = [f"{r:05d}" for r in range(size)]
        self.trainer = self._names[rank]
        self._team: Any = _ThreadTeam(rank, size, board, barrier)


@dataclass(frozen=True)
class Sent:
    """Bytes of one round, means over trainers: payload as encoded in one piece, and what passed by either way."""

    payload: float
    owner: tuple[float, float]  # sent, received
    gather: tuple[float, float]
    fired: float  # share of entries
    union: float


def measure(fleet: Fleet, rule: GateRule, splits: list[SplitUpdate]) -> Sent:
    """Exchange these updates both ways, see that the results are the same bits everywhere, and count."""
    coder, size, count = fleet.coder(rule), fleet.shared.theta.size, len(splits)
    payload = [len(coder.encode(f"{r:05d}", split.sent, split.unit)) for r, split in enumerate(splits)]
    passed, totals = {}, []
    for way in ("owner", "gather"):
        board: list[Any] = [None] * count
        outcomes: list[Outcome | None] = [None] * count
        barrier = threading.Barrier(count, timeout=300)

        def one(rank: int, exchange: GroupExchange, outcomes: list[Any] = outcomes) -> None:
            letter = exchange.prepare(coder, splits[rank])
            outcome = outcomes[rank] = exchange.propose(coder, letter, size)
            exchange.confirm(coder, outcome, fleet.shared)

        group = [_ThreadGroup(r, count, way, board, barrier) for r in range(count)]
        threads = [threading.Thread(target=one, args=(r, group[r])) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = [outcome for outcome in outcomes if outcome is not None]
        assert len(done) == count
        totals += [outcome.total.view(np.uint32) for outcome in done]
        sent, received = ([getattr(one, name) for one in group] for name in ("sent_bytes", "received_bytes"))
        passed[way] = float(np.mean(sent)), float(np.mean(received))
    assert all(np.array_equal(total, totals[0]) for total in totals)
    fired = float(np.mean([split.sent.positions.size for split in splits])) / size
    return Sent(float(np.mean(payload)), passed["owner"], passed["gather"], fired, np.count_nonzero(totals[0]) / size)


def dense_bytes(size: int, trainers: int) -> tuple[int, float]:
    """What DiLoCo sends of FP32 updates: the payload, and by a ring all-reduce, sent and received alike."""
    return 4 * size, 2 * (trainers - 1) / trainers * 4 * size


RULES: dict[str, GateRule] = {"dense": DenseGate(), "exact": VisibilityGate(), "compact": VisibilityGate(3)}
