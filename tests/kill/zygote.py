"""Forks the processes of the kill test from one that has everything loaded, so that a hundred restarts take seconds.

Reads one JSON object a line: {"role": "publisher" | "follower" | "server" | "relay" | "squasher", …}; forks, and
answers with the child's process id. The children do what real ones do, through the library's own front door.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pulsesync import Publisher, Subscriber, chain, warm_up
from pulsesync.errors import AnotherPublisherError, PulseError, StoreError
from pulsesync.squash import Squasher
from tests.kill.training import hash_of, state_after

chain.EPOCH_PATCHES = 4  # so that epochs, squashed patches and anchors are many


def publish(location: str, spool: str, seed: int, checkpoint: str, finish: str, done: str) -> None:
    """A trainer: goes on from its own checkpoint, which may be older than what it published, until told to finish."""
    file = Path(checkpoint)
    step = int(file.read_text()) if file.exists() else 0
    with Publisher(location, spool=spool, anchor_every=0.3) as publisher:
        while True:
            last = Path(finish).exists()
            published = publisher.publish(state_after(seed, step), step=step, wait=False)
            if last or step % 3:
                published.result()
            if last:
                publisher.flush()
                Path(done).with_suffix(".new").write_text(str(step))
                Path(done).with_suffix(".new").rename(done)
                return
            step += 1
            if step % 4 == 0:
                file.with_suffix(".new").write_text(str(step))
                file.with_suffix(".new").rename(file)
            time.sleep(0.005)


def follow(location: str, cache: str | None, log: str, done: str) -> None:
    """A worker: syncs, hashes what it holds, and writes down what it has seen."""
    held = {name: np.zeros_like(bits) for name, bits in state_after(0, 0).items()}
    subscriber = Subscriber(location, cache=cache)
    with Path(log).open("a") as out:
        while True:
            try:
                report = subscriber.sync(held, wait_s=100)
            except StoreError as e:
                if not e.retryable:
                    raise
                time.sleep(0.02)
                continue
            if report.path:
                line = {"version": report.version, "step": report.step, "hash": hash_of(held), "path": report.path}
                out.write(json.dumps(line) + "\n")
                out.flush()
            if Path(done).exists() and report.step == int(Path(done).read_text()):
                subscriber.verify(held)
                return
            time.sleep(0.005)


def squash(location: str) -> None:
    squasher = Squasher(location)
    while True:
        squasher.run()
        time.sleep(0.05)


def serve(folder: str, port: int) -> None:
    from pulsesync.cli.serve import serve as run

    run(Path(folder), host="127.0.0.1", port=port, token_file=None, certificate=None, private_key=None, as_json=True)


def relay(upstream: str, cache: str, port: int) -> None:
    from pulsesync.cli.serve import relay as run

    run(
        upstream, cache=Path(cache), max_cache=None, cafile=None, host="127.0.0.1", port=port, token_file=None,
        certificate=None, private_key=None, as_json=True,
    )  # fmt: skip


ROLES: dict[str, Any] = {"publisher": publish, "follower": follow, "squasher": squash, "server": serve, "relay": relay}


def run(order: dict[str, Any]) -> None:
    """The child: do the work, and tell how it ended by the exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with Path(order.pop("errors")).open("a") as errors:
        os.dup2(errors.fileno(), 2)
        os.dup2(errors.fileno(), 1)
        try:
            ROLES[order.pop("role")](**order)
        except AnotherPublisherError:
            os._exit(4)
        except PulseError:
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(3)
        except BaseException:  # noqa: BLE001 - written down, and told by the exit code
            traceback.print_exc(file=errors)
            errors.flush()
            os._exit(5)
    os._exit(0)


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end are gone at once
    assert ml_dtypes
    warm_up()
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run(json.loads(line))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
