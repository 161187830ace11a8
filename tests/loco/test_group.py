"""Real processes over gloo: with all options, and whichever process dies, replicas agree and nothing is lost."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch

from pulsesync.errors import RoundError, StateError, VerificationError
from pulsesync.loco import GroupExchange, PulseLoCo
from tests.loco.fleet import TOLERANCE, Trainer, Weights, alone, flat, meet, same
from tests.processes import GROUP_TIMEOUT_S, Fleet, die, fleet, group, join_group
from tests.tiers import slow

__all__ = ["fleet"]

WAYS: dict[str, dict[str, Any]] = {
    "DiLoCo": {"kind": "DiLoCo"},
    "PulseLoCo": {},
    "as published": {"kind": "PublishedPulseLoCo", "compact": 2},
    "compact": {"compact": 2},
    "delay": {"delay": 1, "blend": 0.25},
    "compact, delayed, dense steps": {"compact": 3, "delay": 1, "lr": 0.5},
    "fragments": {"pieces": 2},
    "DDP": {"kind": "DDP"},
    "one entry": {"shapes": {"one": (1,)}, "lr": 0.1},
    "one entry, dense": {"shapes": {"one": ()}, "kind": "DiLoCo"},
    "fewer entries than trainers": {"shapes": {"two": (2,)}, "lr": 0.1, "compact": 0},
    "nothing fires": {"lr": 1e-12},
    "no entries at all in one tensor": {"shapes": {"none": (0, 3), "five": (5,)}, "lr": 0.1},
}
ODD_WAYS = (  # which four trainers alone go
    "compact",
    "compact, delayed, dense steps",
    "nothing fires",
    "one entry",
    "one entry, dense",
    "no entries at all in one tensor",
)
WAYS_OF = {2: [way for way in WAYS if way not in ODD_WAYS], 4: [*WAYS]}  # by the count of trainers
STEPS = {2: 4, 4: 6}
REDUCES: tuple[Literal["owner", "gather"], ...] = ("owner", "gather")


class Counter:
    """Counts the bytes that torch.distributed is really given."""

    def __init__(self, size: int) -> None:
        self.sent = self.received = 0
        distributed: Any = torch.distributed  # in this process its functions are replaced
        plain_gather, plain_op = distributed.all_gather, distributed.P2POp
        counter = self

        class Op(plain_op):  # type: ignore[misc,valid-type]
            def __new__(cls, op: Any, tensor: Any, *rest: Any) -> Any:
                counter.sent += tensor.nbytes if op is distributed.isend else 0
                counter.received += tensor.nbytes if op is distributed.irecv else 0
                return plain_op(op, tensor, *rest)

        def all_gather(rows: Any, row: Any, **options: Any) -> Any:
            counter.sent += (size - 1) * row.nbytes
            counter.received += sum(r.nbytes for r in rows) - row.nbytes
            return plain_gather(rows, row, **options)

        distributed.all_gather, distributed.P2POp = all_gather, Op


def all_ways(rank: int, size: int, folder: str) -> dict[tuple[str, str], Any]:
    """Every way, over every exchange."""
    counter = Counter(size)
    out: dict[tuple[str, str], Any] = {}
    with group(folder, "all", rank, size):
        for number, way in enumerate(WAYS_OF[size]):
            options = WAYS[way]
            makers: dict[str, Callable[[], Any]] = {
                "owner": GroupExchange,
                "gather": partial(GroupExchange, reduce="gather"),
                "store": partial(meet, f"{folder}/store-{number}", f"{rank:05d}", size),
            }
            for exchange_name, make_exchange in makers.items():
                trainer = Trainer(make_exchange(), rank, **options)
                counted = count_rounds(trainer, counter)
                with trainer:
                    digests, weights = [], []
                    for _ in range(STEPS[size]):
                        trainer.step()
                        digests.append(list(trainer.loco.digests))
                        weights.append([flat(m).tobytes() for m in trainer.modules])
                out[way, exchange_name] = {
                    "digests": digests,
                    "rounds": trainer.digests,
                    "weights": weights,
                    "counted": counted,
                    "bytes": [(r.sent_bytes, r.received_bytes) for r in trainer.reports],
                    "facts": [(r.fragment, r.round, r.took_part, r.members, r.sent, r.moved) for r in trainer.reports],
                    "residual": trainer.residual.tobytes(),
                    "momenta": [m.numpy().tobytes() for m in trainer.loco.state_dict()["private"]["momenta"]],
                    "balance": trainer.ledger.balance(trainer.loco, trainer.ledger.took),
                }
                torch.distributed.barrier()
    return out


def count_rounds(trainer: Trainer, counter: Counter) -> list[tuple[int, int]]:
    """What was passed between the beginning of a round and its end, in each."""
    watched: Any = trainer.exchange
    counted: list[tuple[int, int]] = []
    propose, confirm, began = watched.propose, watched.confirm, [0, 0]

    def counted_propose(*args: Any) -> Any:
        began[:] = counter.sent, counter.received
        return propose(*args)

    def counted_confirm(*args: Any) -> None:
        confirm(*args)
        counted.append((counter.sent - began[0], counter.received - began[1]))

    watched.propose, watched.confirm = counted_propose, counted_confirm
    return counted


@pytest.fixture(scope="module", params=[2, slow(4)])
def ranks(request: pytest.FixtureRequest, fleet: Fleet) -> list[dict[Any, Any]]:
    return fleet.run(all_ways, request.param)


def test_every_way_over_every_exchange_keeps_replicas_alike_after_every_step(ranks: list[dict[Any, Any]]) -> None:
    for way in WAYS_OF[len(ranks)]:
        options = WAYS[way]
        rounds = ranks[0][way, "owner"]["rounds"]
        assert len(rounds) == STEPS[len(ranks)] // (1 if way == "DDP" else 2)
        for exchange in ("owner", "gather", "store"):
            found = [rank[way, exchange] for rank in ranks]
            for seen in found:
                assert seen["digests"] == found[0]["digests"], (way, exchange)
                assert seen["rounds"] == rounds, (way, exchange)
                assert all(took_part for _, _, took_part, *_ in seen["facts"])
                if "delay" not in options and way != "DDP":
                    assert seen["balance"] < TOLERANCE, (way, exchange)
        for rank in ranks:  # and what is each trainer's own is the same, whatever way its update went
            for key in ("weights", "residual", "momenta", "facts"):
                assert rank[way, "owner"][key] == rank[way, "gather"][key] == rank[way, "store"][key], (way, key)
            if rank[way, "owner"]["momenta"]:  # its own, and so are its weights
                continue
            if not options.get("blend"):  # the fragment whose round it was is where all are
                last = rounds[-1][0]
                assert rank[way, "owner"]["weights"][-1][last] == ranks[0][way, "owner"]["weights"][-1][last]


def test_bytes_are_counted_as_they_are_passed(ranks: list[dict[Any, Any]]) -> None:
    for rank in ranks:
        for (way, exchange), seen in rank.items():
            if exchange == "store":
                continue
            assert len(seen["bytes"]) == len(seen["counted"]) > 0
            assert seen["bytes"] == seen["counted"], (way, exchange)


# What goes wrong, and nobody dies


def in_one_group(rank: int, size: int, folder: str, cases: Sequence[str], every: bool) -> dict[str, Any]:
    """Several cases of three trainers, one after the other: after each, the group is as good as before."""
    with group(folder, "cases", rank, size):
        return {case: globals()[case](rank, every) for case in cases}


@pytest.fixture(scope="module")
def unharmed(fleet: Fleet) -> list[dict[str, Any]]:
    """The results of cases, by rank. If one of them fails, so do the tests of all: its traceback is in each."""
    cases = [case.__name__ for case in (strangers, not_finite, without_memory, parted, unhurt)]
    return fleet.run(in_one_group, 3, cases=cases, every=False)


def fail_after_confirming(exchange: Any, error: BaseException) -> None:
    """Let a trainer miss the end of one round, which the others complete."""
    plain = exchange.confirm

    def confirm(*args: Any) -> None:
        plain(*args)
        del exchange.confirm
        raise error

    exchange.confirm = confirm


def fails(error: type[Exception], call: Callable[[], Any]) -> str:
    """What an exception says that must come."""
    try:
        call()
    except error as e:
        return str(e)
    raise AssertionError(f"no {error.__name__}")


def pairs(kinds: Sequence[dict[str, Any]], every: bool) -> list[tuple[Literal["owner", "gather"], dict[str, Any]]]:
    """Every way to add up with every kind of training; or, for less time, each kind once and the ways in turn."""
    return (
        list(itertools.product(REDUCES, kinds)) if every else list(zip(itertools.cycle(REDUCES), kinds, strict=False))
    )


def garbled(rank: int, size: int, folder: str, every: bool) -> list[Any]:
    """In turn each rank gets damaged bytes, in each collective of a round, of each kind: then all go on."""
    out: list[Any] = []
    with group(folder, "garbled", rank, size):
        for reduce, options in pairs([{"compact": 2}, {"kind": "DiLoCo"}, {}], every):
            trainer = Trainer(GroupExchange(reduce=reduce), rank, sync_every=1, **options)
            with trainer:
                trainer.step()
                for victim in range(size):
                    for call in range(2 if reduce == "owner" else 1):
                        for how in range(4 if size == 2 and options.get("compact") else 1):
                            before = trainer.everything()
                            if rank == victim:
                                garble(trainer.exchange.inner, call, how)
                            told = fails(RoundError, trainer.step)
                            assert trainer.everything() == before
                            assert not trainer.exchange.inner.__dict__.pop("_swap", None)
                            out.append(told)
                trainer.step()
            out.append((trainer.loco.rounds, trainer.loco.digests))
            assert trainer.ledger.balance(trainer.loco, trainer.ledger.took) < TOLERANCE
    return out


def garble(exchange: Any, call: int, how: int) -> None:
    """Damage what one swap brings, once."""
    plain, calls = exchange._swap, [0]

    def swap(outgoing: Any, most: int) -> list[bytes]:
        got: list[bytes] = plain(outgoing, most)
        calls[0] += 1
        if calls[0] == call + 1:
            del exchange._swap
            at = 1 if exchange._rank == 0 else 0
            data = bytearray(got[at])
            if how == 0:
                data[len(data) // 2] ^= 4
            elif how == 1:
                data[-1] ^= 128
            elif how == 2:
                del data[len(data) // 3 :]
            else:
                data[:] = b"\xff" * 40
            got[at] = bytes(data)
        return got

    exchange._swap = swap


@pytest.mark.parametrize(("size", "every"), [(2, False), slow(2, True), slow(3, True)])
def test_damaged_bytes_at_one_trainer_fail_the_round_for_all_and_the_next_one_works(
    fleet: Fleet, size: int, every: bool
) -> None:
    ranks = fleet.run(garbled, size, every=every)
    assert all(rank == ranks[0] for rank in ranks)  # the same words, the same digests
    ended = [entry for entry in ranks[0] if isinstance(entry, tuple)]
    assert [rounds for rounds, _ in ended] == [[2]] * (6 if every else 3)


def strangers(rank: int, every: bool) -> list[Any]:
    """Settings that differ at rank 1, and then beginnings that do."""
    out: list[Any] = []
    others: list[dict[str, Any]] = [
        {"shapes": {"other": (3,)}},
        {"compact": 2},
        {"kind": "DiLoCo"},
        {"lr": 1.0, "delay": 1},
        {"blend": 0.5},
        {"pieces": 2},
        {"reduce": "gather"},
    ]
    for other in others:
        options = dict(other) if rank == 1 else {}
        trainer = Trainer(GroupExchange(reduce=options.pop("reduce", "owner")), rank, **options)
        before = trainer.everything()
        fails(StateError, trainer.__enter__)
        assert trainer.everything() == before
    for kind in ("PulseLoCo", "DiLoCo", "DDP"):
        trainer = Trainer(GroupExchange(), rank, kind, seed=rank)
        with trainer:
            out.append(trainer.weights.tobytes() == flat(Weights(seed=0)).tobytes())
            assert not trainer.residual.any()
            trainer.step(4)
            out.append(trainer.loco.digests)
    return out


def test_other_models_and_settings_are_refused_by_all_and_other_weights_give_way_to_those_of_rank_0(
    unharmed: list[dict[str, Any]],
) -> None:
    ranks = [rank["strangers"] for rank in unharmed]
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0].count(True) == 3


def gradient_of(trainer: Trainer, number: int) -> torch.Tensor:
    gradient = trainer.parameters[number].grad
    assert gradient is not None
    return gradient


def not_finite(rank: int, every: bool) -> list[Any]:
    """Rank 1 has nothing that can be sent."""
    out: list[Any] = []
    for reduce, options in pairs([{"kind": "DiLoCo"}, {}, {"kind": "DDP"}], every):
        with Trainer(GroupExchange(reduce=reduce), rank, sync_every=1, **options) as trainer:
            trainer.step(2)
            before, began = trainer.everything(), time.monotonic()
            good = trainer.modules[0].get_parameter("norm").detach().clone()
            trainer.gradients()
            if rank == 1 and options.get("kind") == "DDP":
                gradient_of(trainer, 0)[2] = float("nan")
            elif rank == 1:
                with torch.no_grad():
                    trainer.modules[0].get_parameter("norm")[2] = float("inf")
            fails(StateError if rank == 1 else RoundError, trainer.optimizer.step)
            assert options.get("kind") == "DDP" or trainer.everything() == before
            assert time.monotonic() - began < GROUP_TIMEOUT_S / 2
            if rank == 1:
                with torch.no_grad():
                    trainer.modules[0].get_parameter("norm").copy_(good)
            trainer.step()
            out.append((trainer.loco.rounds, trainer.loco.digests))
    return out


@pytest.mark.parametrize("every", [False, slow(True)])
def test_one_whose_update_is_not_finite_leaves_nobody_waiting_and_the_next_round_works(
    fleet: Fleet, unharmed: list[dict[str, Any]], every: bool
) -> None:
    found = fleet.run(in_one_group, 3, cases=["not_finite"], every=True) if every else unharmed
    ranks = [rank["not_finite"] for rank in found]
    assert ranks[0] == ranks[1] == ranks[2]
    assert all(rounds == [3] for rounds, _ in ranks[0])


def without_memory(rank: int, every: bool) -> list[Any]:
    """Rank 1 lacks memory at one point of a round: before it sends anything, or between two messages."""
    out: list[Any] = []
    points = {"pulsesync.loco.group.aggregate": RoundError, "pulsesync.loco.round_exchange.describe": MemoryError}
    for reduce in REDUCES:
        for point, error in points.items():
            with Trainer(GroupExchange(reduce=reduce), rank, sync_every=1) as trainer:
                trainer.step(2)
                began = time.monotonic()
                trainer.gradients()
                lacking = patch(point, side_effect=MemoryError("no memory")) if rank == 1 else nullcontext()
                with lacking:
                    fails(error if rank == 1 else RoundError, trainer.optimizer.step)
                assert time.monotonic() - began < GROUP_TIMEOUT_S / 2
                trainer.step()
                out.append((trainer.loco.rounds, trainer.loco.digests))
    return out


def test_one_without_memory_leaves_nobody_waiting_and_the_next_round_works(unharmed: list[dict[str, Any]]) -> None:
    ranks = [rank["without_memory"] for rank in unharmed]
    assert ranks[0] == ranks[1] == ranks[2]
    assert all(rounds == [3] for rounds, _ in ranks[0])


def test_parameters_without_memory_of_their_own_are_refused() -> None:
    model = torch.nn.Linear(2, 2, device="meta")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(StateError, match=r"'weight' .* not a plain tensor"):
        PulseLoCo(model, optimizer, exchange=alone())


def overflowing(rank: int, size: int, folder: str) -> list[Any]:
    """Some ranks have finite updates: the sum of two is not finite, and that of one is too large."""
    out: list[Any] = []
    with group(folder, "overflowing", rank, size):
        for reduce, diverged in ((REDUCES[0], 2), (REDUCES[1], 2), (REDUCES[0], 1)):
            for options in ({}, {"compact": 2}, {"kind": "DiLoCo"}, {"kind": "DDP"}):
                with Trainer(GroupExchange(reduce=reduce), rank, sync_every=1, **options) as trainer:
                    trainer.step(2)
                    theta = trainer.theta
                    if options.get("kind") == "DDP":
                        theta = trainer.weights
                        trainer.gradients()
                        gradient_of(trainer, 2)[0] = 3e38 if rank < diverged else 1.0
                        trainer.optimizer.step()
                    else:
                        if rank < diverged:
                            trainer.diverge()
                        trainer.step()
                        assert bool(trainer.residual.any()) == (rank >= diverged)  # who diverged starts anew
                        assert bool(options.get("kind")) or trainer.momentum.any() == (rank >= diverged)
                        assert same(trainer.weights, trainer.start)
                    assert same(trainer.theta, theta)
                    assert trainer.reports[-1].members == ()
                    trainer.step()
                    assert trainer.reports[-1].took_part
                    out.append((trainer.loco.rounds, trainer.loco.digests, trainer.theta.tobytes()))
    return out


@pytest.mark.slow
def test_finite_updates_that_diverge_make_an_empty_round_for_all_and_the_next_one_works(fleet: Fleet) -> None:
    ranks = fleet.run(overflowing, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert all(rounds == [4] for rounds, *_ in ranks[0])


def parted(rank: int, every: bool) -> str:
    """Rank 1 computes other weights than the others in a round."""
    trainer = Trainer(GroupExchange(), rank, "DiLoCo")
    with trainer:
        trainer.step(2)
        before = trainer.everything()
        inner = trainer.exchange.inner
        if rank == 1:
            plain = inner.propose

            def propose(*args: Any) -> Any:
                outcome = plain(*args)
                outcome.total[0] += 1
                return outcome

            inner.propose = propose
        fails(VerificationError, lambda: trainer.step(2))
        assert trainer.everything() == before
        inner.__dict__.pop("propose", None)
        trainer.step()
        return str(trainer.loco.digests[0])


def test_trainers_that_came_to_different_weights_all_say_so_and_commit_nothing(unharmed: list[dict[str, Any]]) -> None:
    assert len({rank["parted"] for rank in unharmed}) == 1


# Who dies


def killed(rank: int, size: int, folder: str, victim: int, point: str, way: str) -> dict[str, Any]:
    """A trainer dies in its third round; the others make a group without it, and go on."""
    join_group(folder, "before", rank, size)
    trainer = Trainer(GroupExchange(), rank, **WAYS[way])
    began = 0.0
    trainer.loco.__enter__()
    trainer.step(4)
    if rank == victim:
        arm(trainer, point)
    failures = []
    for _ in range(4 if point in POINTS else 10_000):
        before, began = trainer.everything(), time.monotonic()
        try:
            trainer.step()
        except RoundError as e:
            failures.append(str(e))
            assert trainer.everything() == before
            break
    assert failures, "nobody noticed"
    waited = time.monotonic() - began
    (Path(folder) / f"found-{rank}").touch()
    while len(list(Path(folder).glob("found-*"))) < size - 1:  # destroying a group must not be what others notice
        time.sleep(0.005)
    rounds = list(trainer.loco.rounds)
    torch.distributed.destroy_process_group()
    join_group(folder, "after", rank - (rank > victim), size - 1)
    trainer.rejoin(GroupExchange())
    rejoined = list(trainer.loco.digests)
    trainer.step(6)
    torch.distributed.destroy_process_group()
    return {
        "waited": waited,
        "rounds": rounds,
        "rejoined": rejoined,
        "digests": trainer.loco.digests,
        "now": trainer.loco.rounds,
        "took": trainer.ledger.took,
        "ledger": trainer.ledger,
        "state": trainer.loco.state_dict(),
    }


def arm(trainer: Trainer, point: str) -> None:
    """Die at some point of the next round."""
    exchange = trainer.exchange.inner
    calls = [0]

    def then_die(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            call(*args)
            die()

        return run

    if point == "before the exchange":
        exchange.prepare = lambda *_: die()
    elif point == "between two swaps":
        exchange._swap = then_die(exchange._swap)
    elif point == "between sizes and bytes":
        plain = exchange._team.gather_rows

        def gather(row: Any) -> Any:
            rows = plain(row)
            calls[0] += 1
            if calls[0] == 2:
                die()
            return rows

        exchange._team.gather_rows = gather
    elif point == "before it confirms":
        exchange.confirm = lambda *_: die()
    elif point == "after it has confirmed":
        exchange.confirm = then_die(exchange.confirm)
    elif point == "at any moment":
        threading.Timer(random.uniform(0, 0.1), die).start()
    else:
        raise AssertionError(point)


class Frozen:
    """A state that was sent from another process, for a ledger."""

    def __init__(self, state: Any) -> None:
        self.state_dict = lambda: state


POINTS = ["before the exchange", "between sizes and bytes", "between two swaps", "before it confirms"]
FOUND_S = GROUP_TIMEOUT_S / 2  # within which every trainer must find out that one died; measured: 0.03 to 0.2 s


@pytest.mark.parametrize(
    "point",
    ["between two swaps"]
    + [slow(point) for point in ("after it has confirmed", *POINTS) if point != "between two swaps"],
)
def test_when_a_trainer_is_killed_the_others_go_on_without_it_and_nothing_of_theirs_is_lost(
    fleet: Fleet, point: str
) -> None:
    for way in ("PulseLoCo" if point == "between two swaps" else "compact",):
        found = fleet.run(killed, 3, killed=[2], victim=2, point=point, way=way)[:2]
        took = found[0]["took"] | found[1]["took"]
        for seen in found:
            assert seen["waited"] < FOUND_S
            assert seen["rejoined"] == found[0]["rejoined"]
            assert seen["digests"] == found[0]["digests"]
            assert seen["now"] == found[0]["now"]
            assert seen["ledger"].balance(Frozen(seen["state"]), took) < TOLERANCE
        if point == "after it has confirmed":
            assert all(
                seen["rounds"] in ([2], [3]) for seen in found
            )  # its word may have reached one and not the other
        else:
            assert [seen["rounds"] for seen in found] == [[2], [2]]


@pytest.mark.slow  # of three trainers one is killed in the fast tier, and rank 0 in the test after this one
@pytest.mark.parametrize("point", [POINTS[0], "at any moment"])
@pytest.mark.parametrize("victim", range(4))
def test_every_trainer_of_four_finds_at_once_that_one_was_killed_and_three_go_on(
    fleet: Fleet, victim: int, point: str
) -> None:
    found = [seen for seen in fleet.run(killed, 4, killed=[victim], victim=victim, point=point, way="compact") if seen]
    assert [seen["waited"] < FOUND_S for seen in found] == [True] * 3
    assert all(seen["now"] == found[0]["now"] and seen["digests"] == found[0]["digests"] for seen in found)
    assert found[0]["now"][0] >= min(seen["rounds"][0] for seen in found) + 3
    took = set().union(*(seen["took"] for seen in found))
    assert all(seen["ledger"].balance(Frozen(seen["state"]), took) < TOLERANCE for seen in found)


def behind(rank: int, size: int, folder: str, victim: int, late: int, tries: int) -> dict[str, Any]:
    """A trainer dies after the round is confirmed; one survivor commits it, one hears nothing of it."""
    join_group(folder, "before", rank, size)
    trainer = Trainer(GroupExchange(), rank, compact=2)
    trainer.loco.__enter__()
    trainer.step(4)
    inner = trainer.exchange.inner
    plain, heard = inner.confirm, Path(folder) / "heard"

    def confirm(*args: Any) -> None:
        plain(*args)
        if rank not in (victim, late):
            heard.touch()
            return
        until = time.monotonic() + GROUP_TIMEOUT_S
        while not heard.exists() and time.monotonic() < until:
            time.sleep(0.001)
        if rank == victim:
            die()
        raise RoundError("the exchange between the trainers failed: on purpose")

    inner.confirm = confirm
    offered = None
    try:
        trainer.step(4)
    except RoundError:
        offered = trainer.ledger.offers[list(trainer.ledger.offers)[-1]]
        for _ in range(tries):  # as often as the loop around it likes
            fails(RoundError, trainer.step)
    rounds = list(trainer.loco.rounds)
    torch.distributed.destroy_process_group()
    join_group(folder, "after", rank - (rank > victim), size - 1)
    trainer.rejoin(GroupExchange())
    kept = None
    if rank == late and offered:
        kept = same(trainer.residual, offered.residual) and same(trainer.momentum, offered.momentum)
        assert same(trainer.weights, trainer.theta - trainer.residual)
    rejoined = list(trainer.loco.digests)
    trainer.step(6)
    torch.distributed.destroy_process_group()
    return {
        "rounds": rounds,
        "rejoined": rejoined,
        "digests": trainer.loco.digests,
        "took": trainer.ledger.took,
        "ledger": trainer.ledger,
        "state": trainer.loco.state_dict(),
        "kept": kept,
    }


@pytest.mark.parametrize("victim", [0, slow(2)])  # with 0, the others' ranks change
@pytest.mark.parametrize("tries", [2, slow(0)])
def test_one_that_did_not_hear_of_a_round_which_others_committed_is_left_with_what_its_payload_left(
    fleet: Fleet, victim: int, tries: int
) -> None:
    late = 1 if victim == 2 else 2
    results = fleet.run(behind, 3, killed=[victim], victim=victim, late=late, tries=tries)
    ahead, behind_ = results[3 - victim - late], results[late]
    assert (ahead["rounds"], behind_["rounds"]) == ([3], [2])
    assert ahead["rejoined"] == behind_["rejoined"]
    assert ahead["digests"] == behind_["digests"]
    assert behind_["kept"] or tries  # and what it moved in further tries
    for seen in (ahead, behind_):
        assert seen["ledger"].balance(Frozen(seen["state"]), ahead["took"] | behind_["took"]) < TOLERANCE


def grown(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two train, one of them misses the end of a round; then a third comes in between, and the second is the third."""
    trainer = None
    if rank != 1:
        old = rank // 2
        join_group(folder, "two", old, 2)
        trainer = Trainer(GroupExchange(), old, compact=2)
        trainer.loco.__enter__()
        trainer.step(2)
        if old:
            inner = trainer.exchange.inner
            fail_after_confirming(inner, RoundError("so says this test"))
            fails(RoundError, partial(trainer.step, 2))
        else:
            trainer.step(2)
        assert trainer.loco.rounds == [2 - old]
        torch.distributed.destroy_process_group()
    join_group(folder, "three", rank, size)
    if trainer is None:
        trainer = Trainer(GroupExchange(), rank, compact=2)
        trainer.loco.__enter__()
    else:
        trainer.rejoin(GroupExchange())
    trainer.step(4)
    torch.distributed.destroy_process_group()
    return {"digests": trainer.loco.digests, "ledger": trainer.ledger, "state": trainer.loco.state_dict()}


def test_what_was_taken_is_known_under_another_rank_of_a_larger_group(fleet: Fleet) -> None:
    found = fleet.run(grown, 3)
    took = set().union(*(seen["ledger"].took for seen in found))
    for seen in found:
        assert seen["digests"] == found[0]["digests"]
        assert seen["ledger"].balance(Frozen(seen["state"]), took) < TOLERANCE


def unhurt(rank: int, every: bool) -> list[Any]:
    """Rank 1 misses a round's end though the group is whole: all raise, all rejoin, all go on."""
    out: list[Any] = []
    trainer = Trainer(GroupExchange(), rank, sync_every=1)
    with trainer:
        trainer.step(2)
        inner = trainer.exchange.inner
        if rank == 1:
            fail_after_confirming(inner, KeyboardInterrupt())
            try:
                trainer.step()
            except KeyboardInterrupt:
                trainer.rejoin(inner)
        else:
            trainer.step()
            trainer.rejoin(inner)
        out.append((trainer.loco.rounds, trainer.loco.digests))
        trainer.step(3)
        out.append((trainer.loco.rounds, trainer.loco.digests))
        everybody: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybody, trainer.ledger.took)
        assert trainer.ledger.balance(trainer.loco, set().union(*everybody)) < TOLERANCE
    return out


def test_one_that_was_interrupted_at_the_end_of_a_round_comes_back_to_the_others(
    unharmed: list[dict[str, Any]],
) -> None:
    ranks = [rank["unhurt"] for rank in unharmed]
    assert all(rank == ranks[0] for rank in ranks)
    assert [rounds for rounds, _ in ranks[0]] == [[3], [6]]


def out_of_turn(rank: int, size: int, folder: str) -> list[Any]:
    """Rank 1 misses the end of a fragment's round; later one comes who has had no turn yet."""
    out: list[Any] = []
    trainer = None
    if rank < 2:
        join_group(folder, "two", rank, 2)
        trainer = Trainer(GroupExchange(), rank, pieces=2, sync_every=2)
        trainer.loco.__enter__()
        trainer.step(2)
        inner = trainer.exchange.inner
        if rank == 1:
            fail_after_confirming(inner, RoundError("so says this test"))
            fails(RoundError, trainer.step)
        else:
            trainer.step()
        trainer.rejoin(inner)
        trainer.step(2)
        assert trainer.loco.rounds == [3, 2]
        torch.distributed.destroy_process_group()
    join_group(folder, "three", rank, size)
    if trainer is None:
        trainer = Trainer(GroupExchange(), rank, pieces=2, sync_every=2)
        trainer.loco.__enter__()
    else:
        trainer.rejoin(GroupExchange())
    trainer.step(3)
    out.append((trainer.loco.rounds, trainer.loco.digests))
    torch.distributed.destroy_process_group()
    return out


def test_all_agree_on_the_fragment_whose_turn_it_is_whoever_missed_or_joined_what(fleet: Fleet) -> None:
    ranks = fleet.run(out_of_turn, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert ranks[0][0][0] == [4, 4]


def ddp_joined(rank: int, size: int, folder: str) -> str:
    """Averaging at every step goes on only from where all are."""
    with group(folder, "ddp", rank, size):
        trainer = Trainer(GroupExchange(), rank, "DDP")
        with trainer:
            trainer.step(3)
            trainer.loco.rejoin()
            trainer.step()
        late = trainer if rank == 0 else Trainer(GroupExchange(), rank, "DDP")
        if rank == 0:
            late.loco.rejoin()
            return "rejoined"
        fails(StateError, late.__enter__)
        return "refused"


def test_averaging_at_every_step_cannot_be_joined_later(fleet: Fleet) -> None:
    assert fleet.run(ddp_joined, 2) == ["rejoined", "refused"]


# Who comes back, and who comes


def resumed(rank: int, size: int, folder: str, ways: Sequence[str]) -> list[Any]:
    """Trainers save in the middle of a round and go on; others load what they saved, and do the same."""
    out: list[Any] = []
    with group(folder, "resumed", rank, size):
        for way in ways:
            saved = Path(folder) / f"{way}-{rank}"
            with Trainer(GroupExchange(), rank, **WAYS[way]) as trainer:
                trainer.step(5)
                trainer.save(saved)
                trainer.step(6)
            again = Trainer(GroupExchange(), rank, seed=7, **WAYS[way])
            again.load(saved)
            with again:
                again.step(6)
            assert trainer.digests[-3:] == again.digests
            assert trainer.everything() == again.everything()
            assert all(same(flat(a), flat(b)) for a, b in zip(trainer.modules, again.modules, strict=True))
            out.append(again.digests)
    return out


@pytest.mark.parametrize("ways", [("fragments",), slow(("compact", "DiLoCo", "PulseLoCo", "as published"))], ids=str)
def test_a_run_that_was_saved_in_the_middle_of_a_round_goes_on_as_if_nothing_had_happened(
    fleet: Fleet, ways: Sequence[str]
) -> None:
    ranks = fleet.run(resumed, 2, ways=ways)
    assert ranks[0] == ranks[1]


def joined(rank: int, size: int, folder: str) -> list[Any]:
    """Two of three train; rank 1 comes back with a state from long ago, and rank 2 comes new, with other weights."""
    out: list[Any] = []
    trainer: Trainer | None = None
    if rank < 2:
        join_group(folder, "two", rank, 2)
        trainer = Trainer(GroupExchange(), rank, compact=2)
        with trainer:
            trainer.step(5)
            trainer.save(Path(folder) / f"saved-{rank}")
            trainer.step(6)
        torch.distributed.destroy_process_group()
    join_group(folder, "three", rank, size)
    if rank == 0:
        assert trainer is not None
        before, weights = trainer.everything(), trainer.weights
        trainer.rejoin(GroupExchange())
        trainer.loco.__enter__()
        assert trainer.everything() == before
        assert same(trainer.weights, weights)
    else:
        trainer = Trainer(GroupExchange(), rank, seed=5, compact=2)
        if rank == 1:
            trainer.load(Path(folder) / "saved-1")
            assert trainer.residual.any()
            assert trainer.momentum.any()
            assert trainer.loco.rounds == [2]
        trainer.loco.rejoin()
        # A new one has none of its own; of the old one, rounds since have taken a part that is not known.
        assert not trainer.residual.any()
        assert not trainer.momentum.any()
        assert same(trainer.weights, trainer.theta)
        trainer.loco.__enter__()
        trainer.ledger.initial = []
    out.append((trainer.loco.rounds, trainer.loco.digests))
    trainer.step(4)
    out.append((trainer.loco.rounds, trainer.loco.digests))
    torch.distributed.destroy_process_group()
    return out


def test_a_newcomer_and_one_that_comes_back_take_the_shared_state_from_those_who_are_there(fleet: Fleet) -> None:
    ranks = fleet.run(joined, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [rounds for rounds, _ in ranks[0]] == [[5], [7]]


def away(rank: int, size: int, folder: str) -> list[Any]:
    """Rank 2 trains on its own while the others have rounds without it, and then comes back."""
    join_group(folder, "all", rank, size)
    trainer = Trainer(GroupExchange(), rank, compact=2)
    trainer.loco.__enter__()
    trainer.step(4)
    trainer.loco.__exit__()
    torch.distributed.destroy_process_group()
    if rank < 2:
        join_group(folder, "two", rank, 2)
        trainer.rejoin(GroupExchange())
        with trainer:
            trainer.step(6)
        torch.distributed.destroy_process_group()
    else:
        trainer.step(3)
    join_group(folder, "all again", rank, size)
    e, m, moved = trainer.residual, trainer.momentum, trainer.start - trainer.weights
    trainer.rejoin(GroupExchange())
    trainer.loco.__enter__()
    assert same(trainer.residual, e)
    assert same(trainer.momentum, m)
    assert m.any()
    assert same(trainer.start, trainer.theta - e)
    assert same(trainer.weights, trainer.start - moved)
    out = [(trainer.loco.rounds, trainer.loco.digests)]
    trainer.step(4)
    out.append((trainer.loco.rounds, trainer.loco.digests))
    everybody: list[Any] = [None] * size
    torch.distributed.all_gather_object(everybody, trainer.ledger.took)
    assert trainer.ledger.balance(trainer.loco, set().union(*everybody)) < TOLERANCE
    torch.distributed.destroy_process_group()
    return out


def test_one_that_was_away_while_others_had_rounds_keeps_residual_momentum_and_what_it_has_moved(fleet: Fleet) -> None:
    ranks = fleet.run(away, 3)
    assert ranks[0] == ranks[1] == ranks[2]
    assert [rounds for rounds, _ in ranks[0]] == [[5], [7]]


def stopped(rank: int, size: int, folder: str) -> str:
    """Rank 1 stops for longer than the others wait."""
    from datetime import timedelta

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/stopped", rank=rank, world_size=size, timeout=timedelta(seconds=1)
    )
    trainer = Trainer(GroupExchange(), rank)
    with trainer:
        trainer.step(2)
        if rank == 1:
            time.sleep(2.5)
            return "slept"
        before, began = trainer.everything(), time.monotonic()
        fails(RoundError, lambda: trainer.step(2))
        assert trainer.everything() == before
        return "noticed" if time.monotonic() - began < 4 else "too late"


@pytest.mark.slow
def test_a_trainer_that_hangs_is_noticed_after_the_groups_timeout(fleet: Fleet) -> None:
    assert fleet.run(stopped, 3) == ["noticed", "slept", "noticed"]
