"""Process groups on a GPU: NCCL as a group of one, and gloo between two processes that share the GPU.

NCCL wants a GPU for each rank, and the machine of `make gpu-test` may have one: what more than one rank does over NCCL
runs where there are two GPUs, and is skipped elsewhere. Every case runs in processes of its own, which are ended when
their time is over, because what hangs on a GPU cannot be interrupted. Run as a module, this file is such a process.
"""

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from pulsesync.errors import GroupError
from pulsesync.group.collective import Collective
from pulsesync.loco import GroupExchange, PulseLoCo
from tests.examples import Example, python_path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LIMIT_S = 150  # after which the processes of a case are ended; torch and CUDA take some seconds to start
CONNECT_S = 100.0  # for the first message, in which NCCL connects the ranks
ROOT = Path(__file__).parents[2]
SIZES = [1, 1000, (1 << 20) + 3]


# Processes


def run(case: str, ranks: int, folder: Path, *args: str) -> list[dict[str, Any]]:
    """Run a case as some ranks; return what each has reported, by name. All must end by themselves, and well."""
    environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    logs = [folder / f"{case}-{rank}" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.device.test_nccl", case, str(rank), str(ranks), str(folder), *args]
        with log.open("wb") as out, log.with_suffix(".err").open("wb") as errors:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=errors))
    end = time.monotonic() + LIMIT_S
    try:
        for process in processes:
            process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pytest.fail(f"{case} hangs\n{_said(logs)}")
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * ranks, _said(logs)
    return [dict(json.loads(line) for line in log.read_text().splitlines() if line[:2] == '["') for log in logs]


def _said(logs: list[Path]) -> str:
    return "\n".join(
        path.read_text(errors="replace")[-3000:] for log in logs for path in (log, log.with_suffix(".err"))
    )


def report(name: str, value: Any) -> None:
    print(json.dumps([name, value]), flush=True)


def join(backend: str, rank: int, size: int, folder: str) -> None:
    """The group's own timeout is longer than any that is waited here: torch's watchdog must have no reason to act."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/{backend}-{size}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=2 * LIMIT_S),
    )


def filled(size: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed + size).integers(0, 256, size, np.uint8)


def on_gpu(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(filled(size, seed)).cuda()


# Calls of torch that the package makes, in a group of one


def all_gather() -> None:
    mine, rows = on_gpu(1000), [torch.zeros(1000, dtype=torch.uint8, device="cuda")]
    distributed.all_gather(rows, mine, async_op=True).wait(timedelta(seconds=CONNECT_S))
    assert torch.equal(rows[0], mine)


def broadcast() -> None:
    buffer = on_gpu(1000)
    distributed.broadcast(buffer, 0, async_op=True).wait(timedelta(seconds=CONNECT_S))
    assert torch.equal(buffer.cpu(), torch.from_numpy(filled(1000)))


def send_and_receive_in_a_batch() -> None:
    """NCCL lets a rank send to itself, where the receive is in the same batch."""
    mine, box = on_gpu(1000), torch.zeros(1000, dtype=torch.uint8, device="cuda")
    moves = [distributed.P2POp(distributed.isend, mine, 0), distributed.P2POp(distributed.irecv, box, 0)]
    for work in distributed.batch_isend_irecv(moves):
        work.wait(timedelta(seconds=CONNECT_S))
    assert torch.equal(box, mine)


# The package's own calls, in a group of one


def gather() -> None:
    team = Collective(timeout_s=CONNECT_S)
    assert team.device == torch.device("cuda", torch.cuda.current_device())
    assert [team.gather(note) for note in (b"", b"x", bytes(range(256)) * 9)] == [
        [b""],
        [b"x"],
        [bytes(range(256)) * 9],
    ]
    assert (team.sent_bytes, team.received_bytes) == (0, 0)


def gather_rows() -> None:
    team = Collective(timeout_s=CONNECT_S)
    for row in (np.arange(7, dtype=np.int64), filled(999), np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)):
        (got,) = team.gather_rows(row)
        assert (got.dtype, got.shape, got.tobytes()) == (row.dtype, row.shape, row.tobytes())
    assert team.messages == 3


def broadcast_host_memory() -> None:
    team = Collective(timeout_s=CONNECT_S)
    for size in SIZES:
        buffer = filled(size)
        team.broadcast_(buffer, 0)
        assert np.array_equal(buffer, filled(size))
    assert (team.messages, team.sent_bytes) == (len(SIZES), sum(SIZES))


def broadcast_gpu_memory() -> None:
    team = Collective(timeout_s=CONNECT_S)
    for size in SIZES:
        buffer = on_gpu(size)
        assert team._stage(buffer, filled=True) is buffer  # sent as it lies
        team.broadcast_(buffer, 0)
        assert torch.equal(buffer.cpu(), torch.from_numpy(filled(size)))
    assert (team.messages, team.sent_bytes) == (len(SIZES), sum(SIZES))


def move_to_itself() -> None:
    """What send_ and swap do with their messages."""
    team = Collective(timeout_s=CONNECT_S)
    for size in SIZES:
        mine, box = on_gpu(size), torch.zeros(size, dtype=torch.uint8, device="cuda")
        ops = [distributed.P2POp(distributed.isend, mine, 0), distributed.P2POp(distributed.irecv, box, 0)]
        team._transfer(ops)
        with torch.cuda.stream(torch.cuda.Stream()):  # which waits for no other
            assert torch.equal(box, mine)


def send_to_nobody_and_swap_with_nobody() -> None:
    team = Collective(timeout_s=CONNECT_S)
    team.send_(on_gpu(100), 0, [])
    team.send_(filled(100), 0, [])
    assert team.messages == 0
    assert team.swap([b"to myself: not sent"], 100) == [b""]


def under_inference_mode() -> None:
    with torch.inference_mode():
        team, buffer = Collective(timeout_s=CONNECT_S), on_gpu(1000)
        team.broadcast_(buffer, 0)
        assert team.gather(b"note") == [b"note"]


def a_round_of_pulseloco() -> None:
    """The same steps on a GPU over NCCL and on the CPU over gloo: the same digests, and the same shared weights."""
    cpu = distributed.new_group([0], backend="gloo")
    over_nccl, over_gloo = (rounds(*where) for where in (("cuda", None), ("cpu", cpu)))
    assert over_nccl == over_gloo
    assert len(set(over_nccl[0])) == 3  # as it began, and after each of two rounds


def rounds(device: str, group: Any) -> tuple[list[str], list[bytes]]:
    """Steps whose arithmetic is exact, so that a GPU takes the same ones as a CPU: the rate is a power of two."""
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 30)
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(4)]
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-10)
    exchange: Any = GroupExchange(group, timeout_s=CONNECT_S)
    with PulseLoCo(model, optimizer, sync_every=2, exchange=exchange) as loco:
        digests = [" ".join(loco.digests)]
        for gradient in gradients:
            for parameter, g in zip(model.parameters(), gradient, strict=True):
                parameter.grad = g.to(device)
            optimizer.step()
            digests.append(" ".join(loco.digests))
        weights = [tensor.cpu().numpy().tobytes() for tensor in loco.shared_weights().values()]
    return digests, weights


CALLS: list[Callable[[], None]] = [
    all_gather,
    broadcast,
    send_and_receive_in_a_batch,
    gather,
    gather_rows,
    broadcast_host_memory,
    broadcast_gpu_memory,
    move_to_itself,
    send_to_nobody_and_swap_with_nobody,
    under_inference_mode,
    a_round_of_pulseloco,
]


def calls(rank: int, size: int, folder: str) -> None:
    """All of them in one process, one after the other; what went wrong with each is reported."""
    join("nccl", rank, size, folder)
    for call in CALLS:
        try:
            call()
            report(call.__name__, "")
        except Exception:  # noqa: BLE001 - reported, and found by the call's own test
            report(call.__name__, traceback.format_exc())
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run("calls", 1, tmp_path_factory.mktemp("nccl"))[0]


@pytest.mark.parametrize("call", [call.__name__ for call in CALLS])
def test_a_group_of_one_over_nccl_has_every_call_that_the_package_makes(called: dict[str, str], call: str) -> None:
    assert called[call] == "", called[call]


# Waits that end


def keep_stream_busy(seconds: float) -> None:
    """A kernel that takes so long, and then ends by itself: a message that is sent after it waits for it."""
    cycles = 100_000_000
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(seconds / (time.perf_counter() - began) * cycles))


def late(rank: int, size: int, folder: str) -> None:
    """A message that takes longer than this rank waits for it, and what can be done after that."""
    join("nccl", rank, size, folder)
    group, buffer = distributed.new_group([0], backend="nccl"), on_gpu(1000)
    Collective(group, CONNECT_S).broadcast_(buffer, 0)
    team = Collective(group, timeout_s=0.5)
    keep_stream_busy(4)
    began = time.monotonic()
    try:
        team.broadcast_(buffer, 0)
    except GroupError as e:
        report("error", str(e))
    report("waited_s", time.monotonic() - began)
    try:
        team.broadcast_(buffer, 0)
    except GroupError as e:
        report("again", str(e))
    torch.cuda.synchronize()
    time.sleep(1)  # for torch's watchdog, which looks ten times a second
    again = Collective(distributed.new_group([0], backend="nccl"), CONNECT_S)
    report("new group", again.gather(b"still here")[0].decode())
    os._exit(0)  # the group that was aborted is not destroyed


def unmatched(rank: int, size: int, folder: str) -> None:
    """A message that nobody receives: NCCL refuses one to itself outside of a batch with its receive."""
    join("nccl", rank, size, folder)
    team = Collective(timeout_s=CONNECT_S)
    team.gather(b"")
    began = time.monotonic()
    try:
        Collective(timeout_s=5).send_(on_gpu(1000), 0, [0])
    except GroupError as e:
        report("error", str(e))
    report("waited_s", time.monotonic() - began)
    os._exit(0)


def test_a_wait_over_nccl_ends_and_a_new_group_works(tmp_path: Path) -> None:
    (got,) = run("late", 1, tmp_path)
    assert "rank 0 waited 0.5 s for the other ranks" in got["error"]
    assert 0.5 <= got["waited_s"] < 30
    assert "rank 0" in got["again"]  # what was aborted is of no use
    assert got["new group"] == "still here"


def test_a_message_that_nobody_receives_is_an_error_over_nccl(tmp_path: Path) -> None:
    (got,) = run("unmatched", 1, tmp_path)
    assert "rank 0" in got["error"]
    assert got["waited_s"] < 60


# Two ranks


def between_two(rank: int, size: int, folder: str, backend: str) -> None:
    """Messages from GPU to GPU, from host to GPU, and from GPU to host."""
    join(backend, rank, size, folder)
    team = Collective(timeout_s=CONNECT_S)
    team.gather(b"")
    began = team.sent_bytes + team.received_bytes, team.messages
    for length in SIZES:
        for number, (source_on_gpu, target_on_gpu) in enumerate([(True, True), (False, True), (True, False)]):
            for send in (team.broadcast_, lambda buffer, source: team.send_(buffer, source, [1 - source])):
                for source in (0, 1):
                    here = source_on_gpu if rank == source else target_on_gpu
                    seed = 10 * number + source if rank == source else 999
                    buffer = on_gpu(length, seed) if here else filled(length, seed)
                    send(buffer, source)
                    check(buffer, filled(length, 10 * number + source))
    counted = team.sent_bytes + team.received_bytes - began[0], team.messages - began[1]
    assert counted == (sum(SIZES) * 12, len(SIZES) * 12), counted
    outgoing = [b"" if to == rank else filled(5000 + rank).tobytes() for to in range(size)]
    assert team.swap(outgoing, 6000)[1 - rank] == filled(5000 + 1 - rank).tobytes()
    assert team.gather(b"rank %d" % rank) == [b"rank 0", b"rank 1"]
    if backend == "gloo":
        assert team._stage(on_gpu(1000), filled=False).is_pinned()
    distributed.destroy_process_group()
    report("done", True)


def check(buffer: Any, expected: np.ndarray[Any, Any]) -> None:
    if isinstance(buffer, np.ndarray):
        assert np.array_equal(buffer, expected)
        return
    with torch.cuda.stream(torch.cuda.Stream()):  # which waits for no other: what was received is there for it, too
        copy = buffer.clone()
    torch.cuda.synchronize()
    assert np.array_equal(copy.cpu().numpy(), expected)


def test_two_processes_on_one_gpu_exchange_its_memory_over_gloo(tmp_path: Path) -> None:
    assert run("between_two", 2, tmp_path, "gloo") == [{"done": True}] * 2


def test_two_gpus_exchange_their_memory_over_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices: NCCL has one rank on each; NOT run here")
    assert run("between_two", 2, tmp_path, "nccl") == [{"done": True}] * 2


# The example


@pytest.mark.parametrize(("backend", "ranks"), [("NCCL", 1), ("gloo", 2)])
def test_the_example_of_a_broadcast_runs_on_one_gpu(tmp_path: Path, backend: str, ranks: int) -> None:
    """NCCL has one rank on a GPU, which has nobody to send to; two ranks take gloo by themselves."""
    with Example("broadcast.py", tmp_path, ranks=ranks, CUDA_VISIBLE_DEVICES="0") as example:
        lines = example.lines(LIMIT_S)
    assert lines[0] == f"{ranks} ranks over {backend}, weights on cuda:0"
    assert lines[-1] == "sync 5: all ranks have the trainer's weights, bit for bit"


CASES: dict[str, Callable[..., None]] = {one.__name__: one for one in (calls, late, unmatched, between_two)}

if __name__ == "__main__":
    CASES[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
