"""Broadcast over real processes and gloo with weights on a device: those who die, damage what is sent, or come late.

The cases are those of tests/group/test_broadcast.py, with weights on the GPU or, where there is none, in Triton's
interpreter; in mixed groups only the source, or only the receivers, have them there.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from pulsesync.group import bundles
from pulsesync.group.broadcast import Broadcast
from pulsesync.group.cost_model import METHODS, Method
from pulsesync.kernels import spec
from pulsesync.state.sharding import Placed
from tests.backends import host_as_device
from tests.device import interpreter
from tests.group import test_broadcast as cases
from tests.processes import Fleet, fleet, group
from tests.tiers import slow

__all__ = ["fleet"]

interpreter.mend()
MIXED = {"device": (True, True), "source on a device": (True, False), "receivers on a device": (False, True)}
# The interpreter is slow, and so are processes that share two cores: waits are longer than in host memory.
TIMEOUT_S = 30.0


@contextmanager
def on_device(rank: int, memories: str) -> Iterator[torch.device]:
    """Have the weights of a rank on a device, or in host memory, and few of them."""
    there = MIXED[memories][rank > 0]
    place = torch.device("cuda" if there and torch.cuda.is_available() else "cpu")

    def weights(rng: np.random.Generator, rows: int = 20, columns: int = 20) -> dict[str, torch.Tensor]:
        values = torch.from_numpy((0.02 * rng.standard_normal((rows, columns))).astype(np.float32)).bfloat16()
        return {"large.weight": values.to(place), "norm": torch.ones(columns).bfloat16().to(place)}

    with ExitStack() as stack:
        for change in (
            host_as_device(there),
            patch.object(spec, "LANE_DECISIONS", 2),
            patch.object(bundles, "SMALL", 300),
            patch.object(cases, "weights", weights),
            patch.object(cases, "TIMEOUT_S", TIMEOUT_S),
        ):
            stack.enter_context(change)
        yield place


def run(rank: int, size: int, folder: str, name: str, memories: str, **args: Any) -> Any:
    """A case of the tests in host memory."""
    with on_device(rank, memories):
        return getattr(cases, name)(rank=rank, size=size, folder=folder, **args)


def every_method(rank: int, size: int, folder: str, memories: str, methods: list[Method]) -> list[Any]:
    seen = []
    with on_device(rank, memories), group(folder, "one", rank, size):
        for method in methods:
            rng = np.random.default_rng(1)
            model = cases.weights(rng) | {
                "odd": torch.arange(9, dtype=torch.uint8).to(cases.weights(rng)["norm"].device)
            }
            model = cases.zeros(model) if rank else model
            cast = Broadcast(timeout_s=TIMEOUT_S, method=method)
            for density in (0.0, 0.02, 0.0, 1.0):
                if rank == 0:
                    cases.change_(model, rng, density)
                report = cases.sync(cast, rank, model)
                if rank:
                    cast.verify()
                seen.append((f"{method} at {density}", cases.bits(model), report))
    return seen


@pytest.mark.parametrize(
    ("memories", "methods"), [("device", ["coded"]), *(slow(memories, list(METHODS)) for memories in MIXED)]
)
def test_all_ranks_have_the_same_bits_by_every_method(fleet: Fleet, memories: str, methods: list[Method]) -> None:
    results = fleet.run(every_method, 2, memories=memories, methods=methods)
    for (push, sent, report), (_, got, other) in zip(*results, strict=True):
        assert cases.same(sent, got), push
        assert (report.version, report.digest) == (other.version, other.digest), push


@pytest.mark.gpu
def test_nan_payloads_and_signed_zeros_are_carried_exactly_by_every_method(fleet: Fleet) -> None:
    assert fleet.run(awkward, 2) == [dict.fromkeys(METHODS, True)] * 2


def awkward(rank: int, size: int, folder: str) -> dict[str, bool]:
    old, new = np.meshgrid(np.array(cases.AWKWARD, np.uint16), np.array(cases.AWKWARD, np.uint16))
    exact: dict[str, bool] = {}
    with on_device(rank, "device") as place, group(folder, "one", rank, size):
        for method in METHODS:
            before, then = (torch.from_numpy(np.repeat(x, 40).view(np.int16).copy()).to(place) for x in (old, new))
            model = {"w": torch.zeros_like(before) if rank else before}
            model = {"w": model["w"].view(torch.bfloat16)}
            cast = Broadcast(timeout_s=TIMEOUT_S, method=method)
            cases.sync(cast, rank, model)
            if rank == 0:
                model["w"].view(torch.int16).copy_(then)
            cases.sync(cast, rank, model)
            exact[method] = torch.equal(model["w"].view(torch.int16), then)
    return exact


@pytest.mark.parametrize(
    ("method", "memories", "places"),
    [
        ("plain", "device", [8, 100]),
        slow("plain", "device", [0, 8, 40, 100]),
        slow("dense", "receivers on a device", [0, 8, 40, 100]),
        pytest.param("coded", "device", [0, 8, 40, 100], marks=pytest.mark.gpu),
        pytest.param("gap", "device", [0, 8, 40, 100], marks=pytest.mark.gpu),
    ],
)
def test_a_damaged_bucket_is_refused_by_all(fleet: Fleet, method: str, memories: str, places: list[int]) -> None:
    results = fleet.run(run, 2, name="corrupted", memories=memories, method=method, places=places)
    assert all(len(seen) == len(places) for seen in results)
    for said in zip(*results, strict=True):
        assert "GroupError: rank 1 failed in this sync, which is aborted with all weights unchanged: " in said[0][0]
        assert said[1][0].split(":")[0] in ("ChecksumError", "FormatError", "VerificationError", "UnsupportedError")
        assert all(methods == [method, method] for _, methods in said)


@pytest.mark.parametrize("message", [1, pytest.param(0, marks=pytest.mark.gpu), pytest.param(3, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.gpu)])
def test_a_rank_killed_in_a_push_ends_it_for_all_and_a_new_group_goes_on(
    fleet: Fleet, victim: int, message: int
) -> None:
    found = fleet.run(run, 3, killed=[victim], name="killed", memories="device", victim=victim, message=message)
    results = [result for result in found if result]
    assert [method for _, method, _ in results] == ["full" if victim == 0 else "coded"] * 2
    assert cases.same(results[0][2], results[1][2])


@pytest.mark.parametrize("memories", ["source on a device", pytest.param("device", marks=pytest.mark.gpu)])
def test_a_late_member_gets_the_full_state_and_the_others_only_patches(fleet: Fleet, memories: str) -> None:
    results = fleet.run(run, 3, name="late", memories=memories, how="")
    for step in zip(*results, strict=True):
        assert {method for method, _, _ in step} == {"coded"}
        assert cases.same(step[0][2], step[1][2])
        assert cases.same(step[0][2], step[2][2])


@pytest.mark.gpu
def test_a_late_member_whose_state_is_damaged_touches_nothing_and_comes_again(fleet: Fleet) -> None:
    results = fleet.run(run, 3, name="late", memories="device", how="damaged")
    assert [seen[0][0] for seen in results] == ["GroupError", "GroupError", "VerificationError"]
    for step in list(zip(*results, strict=True))[1:]:
        assert {method for method, _, _ in step} == {"coded"}
        assert cases.same(step[0][2], step[2][2])


def split(rank: int, size: int, folder: str) -> list[Any]:
    """Two sources, each with rows of a model, and two tensor-parallel receivers, which have columns of it."""
    seen: list[Any] = []
    whole = torch.from_numpy(np.arange(400, dtype=np.int16).reshape(20, 20))
    with on_device(rank, "device") as place, group(folder, "one", rank, size):
        cast = Broadcast(src=[0, 1], timeout_s=TIMEOUT_S, method="plain")
        part = (
            (whole[10 * rank : 10 * rank + 10] if rank < 2 else torch.zeros(20, 10, dtype=torch.int16))
            .clone()
            .to(place)
        )
        where = (10 * (rank % 2), 10 * (rank % 2) + 10)
        mine = {"w": Placed(part, (20, 20), **({"rows": where} if rank < 2 else {"columns": where}))}
        for step in range(2):
            if rank < 2:
                part.view(-1)[7 * step : 7 * step + 3] += 1
                cast.push(mine)
            else:
                cast.pull_(mine)
                cast.verify()
            seen.append(part.cpu().numpy().copy())
    return seen


def test_several_sources_reach_tensor_parallel_receivers(fleet: Fleet) -> None:
    for first, second, left, right in zip(*fleet.run(split, 4), strict=True):
        whole = np.concatenate([first, second])
        assert np.array_equal(left, whole[:, :10])
        assert np.array_equal(right, whole[:, 10:])


def on_a_stream(rank: int, size: int, folder: str) -> list[int]:
    """Weights are still being written, in a stream of the caller's own, when the source pushes."""
    seen = []
    with on_device(rank, "device") as place, group(folder, "one", rank, size):
        model = {"w": torch.zeros(1 << 22, dtype=torch.bfloat16, device=place)}
        cast, stream = Broadcast(timeout_s=TIMEOUT_S), torch.cuda.Stream()
        for step in range(4):
            with torch.cuda.stream(stream):
                if rank == 0:
                    for _ in range(200):
                        model["w"].add_(1.0).mul_(0.5)
                    model["w"][: 1000 * (step + 1)] = step + 1
                cases.sync(cast, rank, model)
            stream.synchronize()
            seen.append(int(model["w"].view(torch.int16).to(torch.int64).sum()))
    return seen


@pytest.mark.gpu
def test_what_a_caller_has_launched_in_its_own_stream_is_sent(fleet: Fleet) -> None:
    sent, got = fleet.run(on_a_stream, 2)
    assert sent == got
    assert len(set(sent)) > 1
