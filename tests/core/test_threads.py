"""Work spread over threads: the results of a loop, and its exceptions."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

from pulsesync.core import threads
from pulsesync.core.threads import spread


@pytest.fixture(autouse=True)
def two_helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pool of two threads, however many cores there are."""
    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(threads, "_pool", lambda: pool)
        yield


@pytest.mark.parametrize("threads", [None, 1, 2, 3, 50])
def test_results_are_in_the_order_of_the_items(threads: int | None) -> None:
    def work(n: int) -> int:
        time.sleep(0.002 * (n % 3))
        return n * n

    assert spread(work, iter(range(20)), threads) == [n * n for n in range(20)]
    assert spread(work, [], threads) == []


def test_items_are_worked_on_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)
    spread(lambda _: together.wait(), range(3), threads=3)  # raises if one never comes


def test_more_threads_than_items_take_each_item_once() -> None:
    taken: list[int] = []
    spread(taken.append, range(2), threads=50)
    assert sorted(taken) == [0, 1]


@pytest.mark.parametrize(("threads", "items"), [(1, 5), (8, 1)])
def test_what_one_thread_can_do_is_done_by_the_caller_in_order(threads: int, items: int) -> None:
    taken: list[tuple[int, int]] = []
    spread(lambda n: taken.append((n, threading.get_ident())), range(items), threads)
    assert taken == [(n, threading.get_ident()) for n in range(items)]


def test_threads_are_kept_for_the_next_time() -> None:
    seen: set[int] = set()
    for _ in range(20):
        together = threading.Barrier(3, timeout=10)

        def work(_: int, together: threading.Barrier = together) -> None:
            seen.add(threading.get_ident())
            together.wait()

        spread(work, range(3), threads=3)
    assert len(seen) == 3


# Exceptions


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bad", [0, 7, 19])
def test_an_exception_is_raised_as_it_is(threads: int, bad: int) -> None:
    def work(n: int) -> None:
        if n == bad:
            raise KeyError(n)

    with pytest.raises(KeyError, match=str(bad)):
        spread(work, range(20), threads)


def test_an_exception_is_raised_after_the_others_have_ended() -> None:
    running, ended = threading.Event(), []

    def work(n: int) -> None:
        if n == 0:
            assert running.wait(10)
            raise KeyError(n)
        running.set()
        time.sleep(0.05)
        ended.append(n)

    with pytest.raises(KeyError):
        spread(work, range(2), threads=2)
    assert ended == [1]


def test_after_an_exception_nothing_more_is_begun() -> None:
    begun = count()

    def work(n: int) -> None:
        next(begun)
        if n == 0:
            raise KeyError(n)
        time.sleep(0.01)

    with pytest.raises(KeyError):
        spread(work, range(1000), threads=2)
    assert next(begun) < 100


def test_an_interrupt_comes_through_and_the_threads_go_on() -> None:
    def work(n: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spread(work, range(6), threads=3)
    assert spread(abs, [-1, -2, -3], threads=3) == [1, 2, 3]


# Inside each other


def test_work_may_spread_deeper_than_there_are_threads() -> None:
    def work(depth: int) -> int:
        return 1 if depth == 0 else sum(spread(work, [depth - 1] * 3, threads=3))

    assert work(6) == 3**6


def test_an_exception_comes_up_from_the_deepest() -> None:
    def work(depth: int) -> None:
        if depth == 0:
            raise KeyError("deep")
        spread(work, [depth - 1] * 3, threads=3)

    with pytest.raises(KeyError, match="deep"):
        work(5)


def test_many_threads_may_spread_at_once() -> None:
    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(lambda n: spread(lambda k: n * k, range(9), threads=3), range(40)))
    assert found == [[n * k for k in range(9)] for n in range(40)]


# After a fork: the threads do not come along

FORKED = """
import os, threading
from pulsesync.core import threads

def together(count):
    barrier = threading.Barrier(count, timeout=10)
    return threads.spread(lambda n: barrier.wait() * 0 + n, range(count), count)

count = min(threads.default_threads(), 3) + 1  # the pool's and the caller
assert together(count) == list(range(count))
child = os.fork()
if child == 0:
    os._exit(0 if together(count) == list(range(count)) else 1)
assert os.waitpid(child, 0)[1] == 0
assert together(count) == list(range(count))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_has_threads_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


# Executors that accept no more work


def test_work_that_an_executor_refuses_runs_in_a_thread_that_the_interpreter_waits_for() -> None:
    pool, here = ThreadPoolExecutor(1), threading.get_ident()
    assert threads.submit(pool, int, "7").result(10) == 7
    pool.shutdown()
    thread = threads.submit(pool, threading.current_thread).result(10)
    assert thread.ident != here
    assert not thread.daemon
    assert isinstance(threads.submit(pool, int, "seven").exception(10), ValueError)


def refuse_to_start(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let the start of a thread, this one of those to come, fail as it does when the system has no more."""
    start, started = threading.Thread.start, count(1)

    def sometimes(thread: threading.Thread) -> None:
        if next(started) == number:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", sometimes)


def test_spreading_waits_for_the_threads_that_could_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, helping, done = threading.get_ident(), threading.Event(), []

    def work(n: int) -> None:
        if threading.get_ident() == caller:
            assert helping.wait(10)
        else:
            helping.set()
            time.sleep(0.05)
        done.append(n)

    refuse_to_start(monkeypatch, 2)
    spread(work, range(4), threads=3)
    assert sorted(done) == [0, 1, 2, 3]


def test_work_that_an_executor_has_queued_and_refused_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        refuse_to_start(monkeypatch, 1)  # the pool has queued the work when it finds that it has no thread for it
        threads.submit(pool, lambda: ran.append(threading.current_thread().name)).result(10)
        pool.submit(int).result(10)
    assert ran == ["pulse-late"]


def test_work_that_neither_an_executor_nor_a_thread_takes_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ran: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                threads.submit(pool, ran.append, 1)
        pool.submit(int).result(10)  # comes after what was queued
    assert ran == []


def test_while_the_main_thread_lives_no_thread_comes_too_late() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert [threads.outlives_threads(), pool.submit(threads.outlives_threads).result(10)] == [False, False]


# Work that is not left half done


def test_work_is_finished_in_a_thread_of_its_own() -> None:
    seen: list[int] = []
    threads.finish(lambda: seen.append(threading.get_ident()))
    assert len(seen) == 1
    assert seen[0] != threading.get_ident()


def test_what_the_work_raises_is_raised() -> None:
    def work() -> None:
        raise KeyError("half")

    with pytest.raises(KeyError, match="half"):
        threads.finish(work)


def test_finish_enters_no_condition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its methods are Python code: an interrupt in them leaves it locked for ever."""
    done = []

    def interrupted(_: threading.Condition) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Condition, "__enter__", interrupted)
        threads.finish(lambda: done.append(threading.current_thread().name))
    assert done == ["pulse-finish"]
