"""Sharded trainers as they are: processes over gloo, FSDP2, tensor parallelism, optimizer steps, a rank that dies."""

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from pulsesync import SigningKey
from pulsesync.errors import GroupError, PulseError
from pulsesync.group.collective import Collective
from pulsesync.run import bodies
from pulsesync.state.sharding import tensor_parallel
from pulsesync.store import LocalStore
from tests.processes import Fleet, die, fleet, group
from tests.publishers import Publisher, ShardedPublisher, kept_bytes
from tests.readers import RunVerifier, Subscriber
from tests.runs import Watched, version, versions
from tests.tiers import slow

__all__ = ["fleet"]

TIMEOUT_S = 5.0
WORDS, WIDTH, HIDDEN = 11, 7, 14  # uneven over two ranks or three, and 14 over a mesh of two by two


class Model(torch.nn.Module):
    """A language model of the smallest kind, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, HIDDEN)
        self.down = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, words: Any) -> Any:
        hidden = self.norm(self.embed(words))
        return self.head(hidden + self.scale * self.down(torch.relu(self.up(hidden))))


def build(seed: int) -> Model:
    torch.manual_seed(seed)
    return Model()


def train(model: Any, optimizer: Any, step: int) -> None:
    """One step; all ranks see the same words."""
    words = torch.from_numpy(np.random.default_rng(step).integers(0, WORDS, (4, 9)))
    logits = model(words[:, :-1])
    torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), words[:, 1:].reshape(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.steps += 1


def published(model: Any) -> dict[str, Any]:
    """What workers are to get: all of it, gathered for the comparison alone, in the dtype they use. On all ranks."""
    out = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        out[name] = whole.detach().to(torch.bfloat16) if whole.dtype == torch.float32 else whole.clone()
    return out


def blank() -> dict[str, Any]:
    """A worker's model, tied as the trainer's is."""
    model = Model().to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    return model.state_dict()


def assert_same(held: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert held.keys() == wanted.keys()
    for name, tensor in held.items():
        a, b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, wanted[name]))
        assert tensor.shape == wanted[name].shape
        assert torch.equal(a, b), name


def follow(pub: ShardedPublisher, model: Any, optimizer: Any, location: str, count: int, trust: str | None) -> Any:
    """Train and publish; hold every version that a worker gets against the gathered model, bit for bit."""
    held, sub = blank(), Subscriber(location, trust=trust)
    out = []
    for step in range(count):
        if step:
            train(model, optimizer, step)
        if step == 2:
            with torch.no_grad():
                model(torch.zeros((1, 3), dtype=torch.int64))  # after which FSDP has its root's weights gathered
        report = pub.publish(model, step=step)
        wanted = published(model)
        if pub.team.rank == 0:
            sub.sync(held)
            assert sub.verify() == pub.digest
            assert sub.version == report.version
            assert_same(held, wanted)
        out.append((report.version, report.changed, report.payload_bytes, pub.digest))
        torch.distributed.barrier()
    whole = sum(t.numel() * (2 if t.dtype == torch.bfloat16 else 8) for n, t in wanted.items() if n != "head.weight")
    return {"reports": out, "base": kept_bytes(pub), "whole": whole}


def fsdp(rank: int, size: int, folder: str, location: str, seed: int = 0, key: str = "", **options: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    signing_key = SigningKey(key) if key else None
    with group(folder, "fsdp", rank, size):
        model = build(seed)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pub = ShardedPublisher(
            location, Collective(timeout_s=TIMEOUT_S), cast="BF16", signing_key=signing_key, **options
        )
        return follow(pub, model, optimizer, location, 5, signing_key.public if signing_key else None)


def mesh(rank: int, size: int, folder: str, location: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with group(folder, "mesh", rank, size):
        where = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("data", "tensor"))
        model = build(0)
        parallelize_module(model, where["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=where["data"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pub = ShardedPublisher(location, Collective(timeout_s=TIMEOUT_S), cast="BF16")
        return follow(pub, model, optimizer, location, 3, None)


def copies(rank: int, size: int, folder: str, location: str) -> Any:
    """Hybrid: sharded over two, and that twice."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group(folder, "copies", rank, size):
        where = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copy", "shard"))
        model = build(0)
        fully_shard(model, mesh=where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        pub = ShardedPublisher(location, Collective(timeout_s=TIMEOUT_S), cast="BF16")
        return follow(pub, model, optimizer, location, 3, None)


def train_in_background(rank: int, size: int, folder: str, location: str, steps: int, **options: Any) -> Any:
    """Train without waiting for versions; return the committed ones, each compared with the gathered model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group(folder, "background", rank, size):
        model = build(0)
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        team = Collective(torch.distributed.new_group(), timeout_s=TIMEOUT_S)
        pub = ShardedPublisher(location, team, cast="BF16", epoch_patches=4, anchor_every=0.0, **options)
        states, futures = [], []
        for step in range(steps):
            train(model, optimizer, step)
            futures.append(pub.publish(model, step=step, wait=False, now=step == steps - 1))
            states.append(published(model))
        pub.close()
        reports = [future.result() for future in futures]
        for number in versions(LocalStore(Path(location))) if rank == 0 else ():
            held, sub = blank(), Subscriber(location, epoch_patches=4)
            sub.sync(held, version=number)
            sub.verify()
            assert_same(held, states[version(LocalStore(Path(location)), number).step])
        return [(report.version, report.step) for report in reports if report.version is not None]


SHAPES = {"q.weight": (12, 10), "o.weight": (10, 12), "norm": (10,)}


def weights_at(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    state = {name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for name, shape in SHAPES.items()}
    for now in range(step):
        rng = np.random.default_rng([7, now])
        for array in state.values():
            chosen = rng.random(array.shape) < 0.2
            array[chosen] = rng.standard_normal(int(chosen.sum()))
    return state


def parallel_at(step: int, rank: int, size: int) -> dict[str, Any]:
    """The tensors of a tensor-parallel rank, as torch has them."""
    state = {name: torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16) for name, a in weights_at(step).items()}
    mine = {
        "q.weight": state["q.weight"].chunk(size)[rank],
        "o.weight": state["o.weight"].chunk(size, dim=1)[rank].contiguous(),
        "norm": state["norm"],
    }
    return tensor_parallel(mine, rank, size, rows=["q.*"], columns=["o.*"])


def parallel(
    rank: int, size: int, folder: str, location: str, steps: list[int], dies: int = -1, at: str = "", verb: str = ""
) -> Any:
    """Publish steps; one rank may die in the last of them: before it puts such a key, or after it has created one."""
    bodies.INLINE_BYTES = 0  # of this process, which ends with the function
    store = Watched(LocalStore(Path(location)))
    with group(folder, f"{steps[0]}", rank, size):
        pub = ShardedPublisher(store, Collective(timeout_s=TIMEOUT_S), codec="history")
        for step in steps:
            if rank == dies and step == steps[-1]:
                hook = lambda what, key: die() if what == verb and key.startswith(at) else None  # noqa: E731
                store.before, store.after = (hook, store.after) if verb == "put" else (store.before, hook)
            began = time.monotonic()
            try:
                pub.publish(parallel_at(step, rank, size), step=step)
            except PulseError as e:
                return type(e).__name__, time.monotonic() - began, pub.version
        return pub.version, pub.digest


def lose_a_rank(rank: int, size: int, folder: str, location: str, dies: int, at: str, verb: str, late: bool) -> Any:
    """Publish in the background until that fails, because a rank died in the fourth version; then close.

    late: It hangs before it dies, and does not close its connections.
    """
    bodies.INLINE_BYTES = 0  # of this process, which ends with the function
    store = Watched(LocalStore(Path(location)))

    def end(what: str, key: str) -> None:
        if what == verb and key.startswith(at):
            time.sleep(3 * TIMEOUT_S if late else 0)
            die()

    with group(folder, "lost", rank, size):
        pub = ShardedPublisher(store, Collective(timeout_s=TIMEOUT_S), codec="history")
        for step in range(3):
            pub.publish(parallel_at(step, rank, size), step=step)
        if rank == dies:
            store.before, store.after = (end, store.after) if verb == "put" else (store.before, end)
        began, step, futures = time.monotonic(), 3, []
        while time.monotonic() - began < 3 * TIMEOUT_S:
            try:
                futures.append(pub.publish(parallel_at(step, rank, size), step=step, wait=False))
            except GroupError:
                break
            step += 1
            time.sleep(0.01)
        raised_s = time.monotonic() - began
        with pytest.raises(GroupError):  # and so does every later call
            pub.publish(parallel_at(step, rank, size), step=step, wait=False)
        with pytest.raises(GroupError):
            pub.close()
        errors = {type(future.exception(0)).__name__ for future in futures}
        return errors, raised_s, time.monotonic() - began - raised_s, pub.version


def assert_published(location: str, step: int) -> None:
    held = {name: np.zeros(shape, ml_dtypes.bfloat16) for name, shape in SHAPES.items()}
    sub = Subscriber(location)
    sub.sync(held)
    sub.verify()
    for name, array in weights_at(step).items():
        assert held[name].tobytes() == array.tobytes(), name


# -- tests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "codec"),
    [(2, "auto"), *(slow(*case) for case in ((2, "context"), (2, "gap"), (3, "auto"), (3, "context"), (3, "gap")))],
)
def test_what_fsdp_trains_arrives_bit_for_bit_after_every_step(
    fleet: Fleet, tmp_path: Path, size: int, codec: str
) -> None:
    key = SigningKey.generate()
    results = fleet.run(fsdp, size, location=str(tmp_path), codec=codec, key=key.secret if codec == "auto" else "")
    reports = [[report[:3] for report in one["reports"]] for one in results]
    assert all(one == reports[0] for one in reports)
    assert [number for number, _, _ in reports[0]] == list(range(5))
    assert min(changed for _, changed, _ in reports[0]) > 0
    bases = [one["base"] for one in results]
    assert sum(bases) == results[0]["whole"]
    assert max(bases) < results[0]["whole"]
    if codec == "auto":  # it is signed
        assert Subscriber(str(tmp_path), trust=key.public).sync(blank()).version == 4


@pytest.mark.slow
def test_a_sharded_state_has_the_digest_of_the_same_state_in_one_process(fleet: Fleet, tmp_path: Path) -> None:
    results = [fleet.run(fsdp, size, location=str(tmp_path / str(size))) for size in (2, 3)]
    first = {result[0]["reports"][0][3] for result in results}
    with Publisher(str(tmp_path / "one"), cast="BF16") as pub:
        pub.publish(build(0))
        assert first == {pub.digest}


def test_a_mesh_of_data_and_tensor_parallelism_arrives_bit_for_bit(fleet: Fleet, tmp_path: Path) -> None:
    results = fleet.run(mesh, 4, location=str(tmp_path))
    assert [number for number, _, _, _ in results[0]["reports"]] == list(range(3))
    assert sum(one["base"] for one in results) == results[0]["whole"]


def test_copies_of_shards_are_kept_and_sent_once(fleet: Fleet, tmp_path: Path) -> None:
    results = fleet.run(copies, 4, location=str(tmp_path))
    assert [one["base"] == 0 for one in results] == [False, False, True, True]
    assert sum(one["base"] for one in results) == results[0]["whole"]


@pytest.mark.slow
def test_a_restarted_team_takes_the_run_up_and_another_size_begins_anew_in_it(fleet: Fleet, tmp_path: Path) -> None:
    for seed, size in enumerate((2, 2, 3)):
        fleet.run(fsdp, size, location=str(tmp_path), seed=seed, resume=True)
    found = [version(LocalStore(tmp_path), number) for number in versions(LocalStore(tmp_path))]
    assert [one.version for one in found if one.base is None] == [0, 10]
    assert len(found) == 15
    assert len({one.run for one in found}) == 1


@pytest.mark.parametrize(
    ("size", "dies", "at", "verb", "committed"),
    [slow(2, 0, "parts/", "put", False), slow(3, 1, "parts/", "put", False), (3, 0, "manifests/", "create", True)],
)
def test_a_rank_killed_in_a_publish_is_an_error_elsewhere_and_a_new_team_goes_on(
    fleet: Fleet, tmp_path: Path, size: int, dies: int, at: str, verb: str, committed: bool
) -> None:
    location = str(tmp_path)
    results = fleet.run(
        parallel, size, killed=[dies], location=location, steps=[0, 1, 2, 3], dies=dies, at=at, verb=verb
    )
    for survivor in (one for one in results if one is not None):
        assert survivor[0] == GroupError.__name__
        assert survivor[1] < 2 * TIMEOUT_S
        assert survivor[2] == 2  # it did not advance
    assert_published(location, 3 if committed else 2)
    before = len(versions(LocalStore(tmp_path)))
    assert before == (4 if committed else 3)
    both = fleet.run(parallel, size, location=location, steps=[5, 6])
    assert all(one == both[0] for one in both)
    assert_published(location, 6)
    assert all(version(LocalStore(tmp_path), number).base for number in range(1, before + 2))


@pytest.mark.parametrize(("size", "every"), [(3, "auto"), *(slow(*case) for case in ((2, 1), (2, 3)))])
def test_what_fsdp_trains_without_waiting_arrives_bit_for_bit(
    fleet: Fleet, tmp_path: Path, size: int, every: Any
) -> None:
    results = fleet.run(train_in_background, size, location=str(tmp_path), steps=10, publish_every=every)
    assert all(one == results[0] for one in results)
    found = [version(LocalStore(tmp_path), number) for number in versions(LocalStore(tmp_path))]
    assert {(one.version, one.step) for one in found} == set(results[0])
    assert found[-1].step == 9
    assert list(LocalStore(tmp_path).list("anchors/"))
    assert [one.fault for one in RunVerifier(LocalStore(tmp_path), epoch_patches=4).run() if one.fault] == []


@pytest.mark.parametrize(
    ("size", "dies", "at", "verb", "late", "last"),
    [
        (2, 1, "parts/", "put", False, 2),
        slow(3, 0, "manifests/", "create", False, 3),
        slow(3, 2, "parts/", "put", True, 2),
    ],
)
def test_a_rank_killed_while_versions_wait_is_an_error_elsewhere_and_close_waits_for_nobody(
    fleet: Fleet, tmp_path: Path, size: int, dies: int, at: str, verb: str, late: bool, last: int
) -> None:
    location = str(tmp_path)
    results = fleet.run(lose_a_rank, size, killed=[dies], location=location, dies=dies, at=at, verb=verb, late=late)
    for errors, raised_s, closed_s, base in (one for one in results if one is not None):
        assert errors == {GroupError.__name__}  # what was sent and what waited
        assert raised_s < 2 * TIMEOUT_S
        assert closed_s < TIMEOUT_S / 2
        assert base == 2
    assert_published(location, last)
    both = fleet.run(parallel, size, location=location, steps=[5, 6])
    assert all(one == both[0] for one in both)
    assert_published(location, 6)
