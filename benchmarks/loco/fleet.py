"""Several trainers in one process, taking turns: what the benchmarks of PULSELoCo share.

The trainers are as real as in a run across processes: each has its own inner optimizer, rollouts, residual and outer
momentum, and what they exchange goes through the library's gate, coder and exchange. Only the transport is a list in
memory. Rollouts of a round are generated with the BF16 values of the round's shared weights, as workers would.

All trainers use one policy, on the device, in turn; residuals and momenta stay in host memory.
"""

import argparse
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pulsesync.core.threads import spread
from pulsesync.kernels.reference import bf16
from pulsesync.loco.gate import LARGEST, SentUpdate, SparseVector, Update, unit_of
from pulsesync.loco.group import GroupExchange
from pulsesync.loco.outer_step import LARGEST_UPDATE, OuterRule, TrainerUpdate
from pulsesync.loco.payload import Coder, describe
from pulsesync.loco.shared import Outcome, SharedState
from pulsesync.loco.vectors import F32, chunks_of
from pulsesync_lab.demo.game import Game
from pulsesync_lab.demo.grpo import Rollouts


def arguments(parser: argparse.ArgumentParser, *, lr: float, rounds: int) -> None:
    """Add the options of a benchmark that trains a fleet, with its own defaults."""
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--trainers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--prompts", type=int, default=8, help="prompts in a trainer's step")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--say", action="store_true", help="print every round as it ends")


def settings(given: argparse.Namespace) -> dict[str, Any]:
    """The settings of a fleet by those options."""
    return {"sync_every": given.every} | {name: getattr(given, name) for name in ("trainers", "lr", "prompts", "group")}


class Chosen:
    """A gate that sends the largest entries or random ones: as many as fit in a budget of bytes."""

    dense = False

    def __init__(self, largest: bool, bits: int | None, seed: int) -> None:
        self.largest, self.bits, self.count, self._random = largest, bits, 1, np.random.default_rng(seed)

    def select(self, theta: F32, update: Update) -> SentUpdate:
        s = np.concatenate([update.read(here) for here in chunks_of(update.size)])
        sizes = np.abs(s)
        count = min(max(1, self.count), s.size)
        if self.largest:
            positions = np.sort(np.argpartition(sizes, s.size - count)[s.size - count :])
        else:
            positions = np.sort(self._random.choice(s.size, count, replace=False, shuffle=False))
        positions = positions[s[positions] != 0]
        values, unit = s[positions], None
        if self.bits is not None:  # as VisibilityGate does
            unit = unit_of(values, self.bits)
            rounded = np.clip(np.rint(np.ldexp(values.astype(np.float64), -unit)), -LARGEST, LARGEST)
            positions, rounded = positions[rounded != 0], rounded[rounded != 0]
            values = np.ldexp(rounded, unit).astype(np.float32)
        return SentUpdate(SparseVector(s.size, positions, values), unit, sizes.max())


@dataclass(eq=False)
class Trainer:
    """The state that belongs to one trainer."""

    optimizer: torch.optim.Optimizer
    residual: F32
    momentum: F32 | None


class Fleet:
    """Trainers of one policy, their shared state, and rounds between them.

    for number, update in fleet.work():
        fleet.take(update, gate.select(fleet.shared.theta, update))
    fleet.step()
    """

    def __init__(
        self,
        game: Game,
        rule: OuterRule,
        *,
        trainers: int,
        sync_every: int,
        lr: float,
        prompts: int,
        group: int,
        seed: int,
        forward: str = "FP32",
    ) -> None:
        self.game, self.rule, self.sync_every, self.lr = game, rule, sync_every, lr
        self.prompts, self.group, self.seed, self.forward = prompts, group, seed, forward
        self.policy = game.policy()
        self._weights = list(self.policy.parameters())
        self._masters = self._gathered()
        pinned = self._masters.device.type == "cuda"
        self._host = torch.empty(self._masters.shape, pin_memory=pinned)  # all trainers' weights pass through it
        theta = self.read().copy()
        self.shared = SharedState("0" * 64, theta, rule.first_trend(theta.size))
        self.trainers = [self._join(None) for _ in range(trainers)]
        self.total = np.zeros_like(theta)  # of what was taken in this round
        self.rewards: list[float] = []

    def _join(self, momentum: F32 | None) -> Trainer:
        optimizer = torch.optim.AdamW(self._weights, lr=self.lr, weight_decay=0.0)
        if self.forward == "BF16":
            optimizer.register_step_pre_hook(lambda *_: self._scatter(self._masters))
        if self.rule.own_momentum and momentum is None:
            momentum = np.zeros_like(self.shared.theta)
        return Trainer(optimizer, np.zeros_like(self.shared.theta), momentum)

    def replace(self, number: int, momentum: F32 | None) -> None:
        """Replace a trainer, whose own state is lost, by a new one, with this momentum or none."""
        self.trainers[number] = self._join(momentum)

    # Weights in and out of the policy

    def _gathered(self) -> Tensor:
        return torch.cat([weight.detach().reshape(-1) for weight in self._weights])

    @torch.no_grad()
    def _scatter(self, flat: Tensor) -> None:
        at = 0
        for weight in self._weights:
            weight.copy_(flat[at : at + weight.numel()].view(weight.shape))
            at += weight.numel()

    def read(self) -> F32:
        """The policy's weights, in memory that the next call, and the next trainer's turn, use again."""
        self._host.copy_(self._gathered())
        return np.asarray(self._host.numpy(), np.float32)

    def write(self, values: F32, as_workers: bool = False) -> None:
        flat = torch.from_numpy(values).to(self._masters.device)
        self._scatter(flat.bfloat16().float() if as_workers else flat)

    # A round

    def play(self, trainer: int, steps: int, number: int) -> Rollouts:
        """Rollouts for the given number of steps of a trainer, with the current weights of the policy."""
        seed = (self.seed * 1_000_003 + number) * 1009 + trainer
        return self.game.play(self.policy, self.prompts * steps, seed)

    def evaluate(self, prompts: int) -> float:
        """The mean reward of the shared weights, as BF16, on the same prompts in every call."""
        self.write(self.shared.theta, as_workers=True)
        return float(self.game.play(self.policy, prompts, 987_654_321).rewards.mean())

    def learn(self, optimizer: torch.optim.Optimizer, rollouts: Rollouts) -> None:
        """Update the FP32 weights by a step. Gradients are taken at them, or at their BF16 values, as by autocast."""
        if self.forward == "BF16":
            self._masters = self._gathered()
            self._scatter(self._masters.bfloat16().float())
        self.game.learn(self.policy, optimizer, rollouts)

    def work(self) -> Iterator[tuple[int, TrainerUpdate]]:
        """Let every trainer take its steps, in turn; yield its number and its update, which is valid until the next."""
        self.write(self.shared.theta, as_workers=True)
        played = [self.play(r, self.sync_every, self.shared.round) for r in range(len(self.trainers))]
        self.rewards.append(float(torch.stack([p.rewards.mean() for p in played]).mean()))
        self.total = np.zeros_like(self.shared.theta)
        rows = self.prompts * self.group
        for number, (trainer, rollouts) in enumerate(zip(self.trainers, played, strict=True)):
            theta, residual = self.shared.theta, trainer.residual
            self.write(self.rule.start(theta, residual))
            for step in range(self.sync_every):
                self.learn(trainer.optimizer, _rows(rollouts, step * rows, (step + 1) * rows))
            yield number, TrainerUpdate(self.rule, theta, residual, trainer.momentum, self.read().__getitem__)

    def take(self, update: TrainerUpdate, part: SentUpdate) -> None:
        """Add a part of an update to the round's sum; the trainer keeps the rest."""
        if not part.largest <= LARGEST_UPDATE:
            raise RuntimeError(f"a trainer has diverged in round {self.shared.round + 1}")
        part.sent.add_to(self.total)
        update.commit(part.sent)

    def step(self, total: F32 | None = None) -> None:
        """Apply the outer step with the sum of this round, or with another sum, whose memory is overwritten."""
        members = {f"{r:05d}": "" for r in range(len(self.trainers))}
        result = self.shared.resolve(Outcome(members, self.total if total is None else total), self.rule)
        if not result.members:
            raise RuntimeError(f"round {self.shared.round + 1} has diverged")
        self.shared = result.after

    def work_together(self) -> None:
        """The same number of steps by DDP: gradients are averaged at each, with rollouts of the current weights."""
        gathered = []
        for step in range(self.sync_every):
            self.write(self.shared.theta, as_workers=True)
            number = self.shared.round * self.sync_every + step
            played = Rollouts.join([self.play(r, 1, number) for r in range(len(self.trainers))])
            gathered.append(float(played.rewards.mean()))
            self.write(self.shared.theta)
            self.learn(self.trainers[0].optimizer, played)
            self.shared = replace(self.shared, theta=self.read().copy())
        self.rewards.append(float(np.mean(gathered)))
        self.shared = replace(self.shared, round=self.shared.round + 1)

    def coder(self, dense: bool) -> Coder:
        described = None if dense else describe(self.shared.theta, self.shared.trend)
        return Coder(0, self.shared.round + 1, self.shared.digest, described)

    def apart(self, number: int) -> float:
        """The share of weights for which a trainer's next round begins with another BF16 value than the shared one."""
        theta, residual = self.shared.theta, self.trainers[number].residual
        start = self.rule.start(theta, residual)
        if start is theta:
            return 0.0
        found = spread(lambda here: np.count_nonzero(bf16(theta[here]) != bf16(start[here])), chunks_of(theta.size))
        return float(sum(found) / theta.size)


def _rows(rollouts: Rollouts, begin: int, end: int) -> Rollouts:
    return Rollouts(rollouts.tokens[begin:end], rollouts.log_probabilities[begin:end], rollouts.rewards[begin:end])


# What an exchange of these updates sends


class _ThreadTeam:
    """Replaces `Collective` between threads, and counts bytes as it does."""

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
    """Bytes of one round, means over trainers: the payload encoded in one piece, and what each exchange sends."""

    payload: float
    wire: dict[str, tuple[float, float]]  # "owner" or "gather" -> sent, received
    share: float  # of the entries, that a trainer sent
    union: float  # of the entries, that any sent and that did not cancel out


def measure(fleet: Fleet, parts: Sequence[SentUpdate], ways: Sequence[str] = ("owner", "gather")) -> Sent:
    """Exchange these sparse updates, check that all trainers get the same bits, and count the bytes."""
    coder, size, count = fleet.coder(dense=False), fleet.shared.theta.size, len(parts)
    payload = [len(coder.encode(f"{r:05d}", part.sent, part.unit)) for r, part in enumerate(parts)]
    wire, totals = {}, []
    for way in ways:
        board: list[Any] = [None] * count
        outcomes: list[Outcome | None] = [None] * count
        barrier = threading.Barrier(count, timeout=300)

        def one(rank: int, exchange: GroupExchange, outcomes: list[Any] = outcomes) -> None:
            encoded = exchange.prepare(coder, parts[rank])
            outcome = outcomes[rank] = exchange.propose(coder, encoded, size)
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
        wire[way] = float(np.mean(sent)), float(np.mean(received))
    assert all(np.array_equal(total, totals[0]) for total in totals)
    share = float(np.mean([len(part.sent.positions) for part in parts])) / size
    return Sent(float(np.mean(payload)), wire, share, np.count_nonzero(totals[0]) / size)


def dense_bytes(size: int, trainers: int) -> tuple[int, float]:
    """The bytes of FP32 updates in DiLoCo: the payload, and those that a ring all-reduce sends (and receives)."""
    return 4 * size, 2 * (trainers - 1) / trainers * 4 * size
