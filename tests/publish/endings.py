"""Programs whose end is tested: each runs in a process of its own, which ends as an interpreter does."""

import atexit
import concurrent.futures.thread as pools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pulsesync import Subscriber
from pulsesync.core import threads
from pulsesync.errors import ClosedError
from pulsesync.run import bodies
from pulsesync.store import LocalStore
from tests.publishers import Publisher


class HookedStore(LocalStore):
    """Calls a function before every write."""

    def __init__(self, folder: Path | str, hook: Callable[[], object] = lambda: None) -> None:
        super().__init__(folder)
        self.hook = hook

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.hook()
        super().put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self.hook()
        super().create(key, data)


def small() -> dict[str, Any]:
    return {"w": np.zeros(500, np.float32)}


def end_before_a_version_is_sent(folder: str) -> None:
    """One version is delayed until the interpreter starts no more threads; the next is encoded only after that."""
    threads.default_threads = lambda: 2
    bodies.INLINE_BYTES = 0
    reached, waited = threading.Event(), threading.Lock()

    def wait_for_the_end() -> None:
        if not waited.acquire(blocking=False):
            return
        reached.set()
        with suppress(RuntimeError):  # the interpreter starts no more threads
            while True:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(time.sleep, 0.01)

    weights, store = {name: np.zeros(5000, np.float32) for name in "abc"}, HookedStore(folder)
    pub = Publisher(store)
    pub.publish(weights)
    pub.flush()
    store.hook = wait_for_the_end
    for step in (1, 2):
        for array in weights.values():
            array[step::7] += step
        pub.publish(weights, step=step, wait=False)
        assert reached.wait(30)


def end_within_a_version(folder: str, at: int) -> None:
    """End while one write of many, counted from version 2 on, takes until executors accept nothing any more."""
    reached, lock, seen = threading.Event(), threading.Lock(), [0]

    def count() -> None:
        with lock:
            mine = seen[0] == at
            seen[0] += 1
        if mine:
            reached.set()
            while not pools._shutdown:
                time.sleep(0.001)

    weights, store = small(), HookedStore(folder)
    pub = Publisher(store, anchor_every=0, epoch_patches=2)
    for step in range(4):
        weights["w"][step::7] += step
        if step == 2:
            pub.flush()
            store.hook = count
        if step < 2:
            pub.publish(weights, step=step)
        else:
            pub.publish(weights, step=step, wait=False)
        while step == 2 and seen[0] == 0:  # step 3 is pending then
            time.sleep(0.001)
    reached.wait(1)


def end_with(folder: str, ending: str) -> None:
    """End while step 1 is sent, and step 2 is published in one of several ways."""
    weights, store, go = small(), HookedStore(folder), threading.Event()
    pub = Publisher(store)

    def publish(step: int) -> None:
        weights["w"][step::7] += step
        pub.publish(weights, step=step, wait=False)

    def publish_late() -> None:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        publish(2)

    def refuse() -> None:
        assert go.wait(30)
        raise PermissionError("403")

    publish(0)
    pub.flush()
    store.hook = refuse if ending == "refused" else lambda: time.sleep(0.04)
    publish(1)
    if ending == "thread":
        threading.Thread(target=publish_late).start()
    elif ending == "atexit":
        atexit.register(publish, 2)
    else:
        publish(2)
        if ending == "exception":
            raise ZeroDivisionError
        go.set()


def end_with_a_daemon_that_publishes(folder: str, said: str) -> None:
    """The daemon writes down the last step that was accepted, and what ended it."""
    weights, begun = small(), threading.Event()
    pub = Publisher(HookedStore(folder, lambda: time.sleep(0.02)))

    def publish() -> None:
        for step in range(1000):  # ten seconds, if nothing ends it
            weights["w"][step % 500] += 1
            try:
                pub.publish(weights, step=step, wait=False)
            except ClosedError as e:
                Path(said).write_text(f"{step - 1} {e}")
                return
            begun.set()
            time.sleep(0.01)
        os._exit(7)

    pub.publish(weights)
    threading.Thread(target=publish, daemon=True).start()
    begun.wait(30)


def fork_while_a_version_is_sent(folder: str) -> None:
    """The child of a process with publishers can use none of them but one that has published nothing.

    The folder for temporary files must be this process's own.
    """
    go, reached, parent = threading.Event(), threading.Event(), os.getpid()

    def stop() -> None:
        reached.set()
        go.wait(30)

    def assert_raises(call: Callable[[], object]) -> None:
        with pytest.raises(ClosedError, match=f"belongs to process {parent}"):
            call()

    place, weights = Path(folder), {"w": np.zeros((700, 100), np.float32)}
    held = {"w": np.zeros((700, 100), np.float32)}
    unused, store = Publisher(place / "unused"), HookedStore(place / "run")
    pub = Publisher(store)
    pub.publish(weights)
    Subscriber(place / "run").sync(held)
    weights["w"][::3] = 1
    store.hook = stop
    future = pub.publish(weights, wait=False)
    assert reached.wait(30)
    (temporary,) = temporary_folders()
    if os.fork() == 0:
        with pub:  # closing it here does nothing
            assert_raises(lambda: pub.publish(weights))
            assert_raises(lambda: pub.publish(weights, wait=False))
            assert_raises(pub.flush)
        with Publisher(place / "own") as own:
            own.publish(weights)
            weights["w"][5] = 2
            own.publish(weights)
        unused.publish(weights)  # nobody has published with it
        held["w"][...] = 7
        Subscriber(place / "own").sync(held)
        assert (held["w"] == weights["w"]).all()
        Subscriber(place / "run").sync(held)
        assert (held["w"] == 0).all()
        sys.exit(0)  # with the finalizers and threads of the parent
    assert os.wait()[1] == 0
    assert temporary_folders() == [temporary]
    go.set()
    assert future.result(30).version == 1
    pub.close()
    assert temporary_folders() == []


def temporary_folders() -> list[Path]:
    return [path for path in Path(tempfile.gettempdir()).glob("pulse-*") if path.is_dir()]
