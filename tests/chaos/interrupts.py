"""Interrupt a process in the middle of publishes and syncs, many times, and count what its program sees.

python -m tests.chaos.interrupts 300      # prints how often each exception reached the program

Each interrupt is that of a forked process which publishes and syncs in a loop, and retries after every Exception. In
turn it is Ctrl-C, and SIGTERM with a handler that calls `sys.exit(143)`, as the documentation recommends.
"""

import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

import pulsesync
from pulsesync import Publisher, Subscriber
from pulsesync.store import MemoryStore

SIZE = 300_000
STATES = 2  # published in turn
PATIENCE_S = 10.0  # for a publish or a sync that an interrupt ends
# Python ignores what a handler raises inside a callback of a weak reference, as when a thread object is freed.
LOST = "sent again"


def states() -> list[dict[str, Any]]:
    """Two states between which a trainer changes; a fiftieth of the weights differs."""
    rng = np.random.default_rng(0)
    first = rng.normal(0, 0.02, SIZE).astype(ml_dtypes.bfloat16)
    second = first.copy()
    second.view(np.uint16)[rng.permutation(SIZE)[: SIZE // 50]] ^= 1
    return [{"w": first}, {"w": second}]


def work(ready: int, both: list[dict[str, Any]]) -> NoReturn:
    """Publish and sync until the interrupt comes; end with a status that says how it arrived."""
    seen = "nothing"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run = MemoryStore()
        held = {"w": np.zeros(SIZE, ml_dtypes.bfloat16)}
        pub, sub = Publisher(run, codec="history"), Subscriber(run)
        for n in range(1_000_000):
            try:
                pub.publish(both[n % STATES])
                sub.sync(held)
            except Exception as e:  # noqa: BLE001 - what a program that tries again would do with an interrupt
                seen = f"{type(e).__name__}: {e}"
                break
            if n == STATES:
                os.write(ready, b"+")
    except KeyboardInterrupt:
        seen = "KeyboardInterrupt"
    except SystemExit as e:
        seen = f"SystemExit {e.code}"
    os.write(ready, seen.encode()[:4000])
    os._exit(0)


def count(interrupts: int) -> Counter[str]:
    """How often each exception reached the program."""
    out: Counter[str] = Counter()
    both, rng = states(), random.Random(0)
    for n in range(interrupts):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            work(write, both)
        os.close(write)
        assert os.read(read, 1) == b"+"
        time.sleep(rng.uniform(0, 0.06))
        sent = (signal.SIGINT, signal.SIGTERM)[n % 2]
        os.kill(pid, sent)
        while not select.select([read], [], [], PATIENCE_S)[0]:
            out[LOST] += 1
            os.kill(pid, sent)
        with os.fdopen(read, "rb") as end:
            out[end.read().decode()] += 1
        os.waitpid(pid, 0)
    return out


if __name__ == "__main__":
    pulsesync.warm_up()
    print(json.dumps(count(int(sys.argv[1]))))
