"""What the processes of a trial do: what real ones do, through the library's public interface.

They end as real ones end (the interpreter waits for threads and runs exit handlers), and report every step to the
witness.
"""

import logging
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from pulsesync import PublishReport
from pulsesync.errors import AnotherPublisherError, PulseError, StoreError
from pulsesync.store import ObjectEntry, Store, WrappedStore, open_store
from tests.chaos.training import STEPS, hash_of, state_after
from tests.chaos.witness import WitnessHandler, say
from tests.publishers import Publisher
from tests.readers import Squasher, Subscriber

EPOCH_PATCHES = 4  # short epochs: a trial has many of them, and many squashed patches and anchors

# The trainer


class Trainer:
    """Publishes states and reports the outcome of each publish to the witness."""

    def __init__(self, publisher: Publisher, mode: str) -> None:
        self.publisher = publisher
        self.options: dict[str, Any] = {
            "wait": {"wait": True},
            "background": {"wait": False},
            "every-step": {"wait": False, "coalesce": False},
        }[mode]

    def publish(self, step: int) -> Future[PublishReport] | None:
        """Publish the state of a step. Raises: what the publisher raises, after it was reported."""
        say("begun", step=step)
        try:
            result: PublishReport | Future[PublishReport] = self.publisher.publish(
                state_after(step), step=step, **self.options
            )
        except BaseException as e:
            say("raised", step=step, call="publish", error=type(e).__name__)
            raise
        if isinstance(result, PublishReport):
            say("resolved", step=step, version=result.version, published_step=result.step)
            return None
        say("returned", step=step)
        result.add_done_callback(lambda future: _settled(step, future))
        return result

    def close(self) -> None:
        try:
            self.publisher.close()
        except BaseException as e:
            say("raised", call="close", error=type(e).__name__)
            raise
        say("closed")


def _settled(step: int, future: Future[PublishReport]) -> None:
    # By the base class: the publisher must not take this for a caller who has read the error, and who needs no other.
    error = Future.exception(future)
    if error is None:
        report = Future.result(future)
        say("resolved", step=step, version=report.version, published_step=report.step)
    else:
        say("failed", step=step, error=type(error).__name__)


def publish(
    location: str, spool: str, mode: str, checkpoint: str, finish: str, done: str, first: int = 0, steps: int = STEPS
) -> None:
    """Train from the last checkpoint, which may be older than what was published, until the file `finish` is there."""
    file = Path(checkpoint)
    step = int(file.read_text()) if file.exists() else first
    trainer = Trainer(Publisher(location, spool=spool, anchor_every=0.3, epoch_patches=EPOCH_PATCHES), mode)
    while True:
        last = Path(finish).exists() or step + 1 == first + steps
        try:
            published = trainer.publish(step)
            if published is not None and (last or step % 3):
                published.result()
            if last:
                trainer.publisher.flush()
        except StoreError as e:
            say("raised", step=step, call="result", error=type(e).__name__)
            if not e.retryable:
                raise
            time.sleep(0.1)
            continue  # a trainer would go on; the next version covers this step
        if last:
            trainer.close()
            _replace(Path(done), str(step))
            return
        step += 1
        if step % 4 == 0:
            _replace(file, str(step))
        time.sleep(0.005)


def publish_and_exit(location: str, ends_at: int, how: str, steps: int) -> None:
    """Publish in the background, and let the interpreter end while one store call of many is under way.

    At that moment one version is being sent and another one is waiting. ends_at: the number of that call, counted from
    the first one after version 0 and its anchor.
    """
    store = CountingStore(open_store(location), latency_s=0.01)
    publisher = Publisher(store, anchor_every=0.01, epoch_patches=EPOCH_PATCHES)  # an anchor at the end of every epoch
    trainer = Trainer(publisher, "background")
    trainer.publisher.publish(state_after(0), step=0)
    trainer.publisher.flush()
    store.notify_at(ends_at)
    for step in range(1, 1 + steps):
        future = trainer.publish(step)
        assert future is not None
        while not (future.done() or store.reached.is_set()):
            time.sleep(0.001)
        if store.reached.is_set():
            trainer.publish(step + 1)
            break
    say("ending", call=store.calls, how=how)
    if how == "exit":
        sys.exit(0)
    if how == "raise":
        raise KeyboardInterrupt


def publish_until_it_raises(location: str, mode: str, steps: int, fails_at: int, disk_is_full: bool) -> None:
    """Publish in the pattern of the README while the store fails for good from some step on.

    disk_is_full: the limit on file sizes of this process is set to nothing, so that every write to a folder fails.
    Otherwise the process reports when it reaches the step, and waits until the store is made to fail.
    """
    trainer = Trainer(Publisher(location, epoch_patches=EPOCH_PATCHES), mode)
    for step in range(steps):
        if step == fails_at:
            if not disk_is_full:
                trainer.publisher.flush()
                say("ready", step=step)
                time.sleep(0.3)
            else:
                trainer.publisher.flush()
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with suppress(PulseError):
            trainer.publish(step)
        time.sleep(0.02)
    with suppress(PulseError):
        trainer.close()


class CountingStore(WrappedStore):
    """Counts the calls that reach a store, makes each take some time, and says when one of them has begun."""

    def __init__(self, store: Store, latency_s: float) -> None:
        super().__init__(store)
        self.latency_s = latency_s
        self.calls, self.reached = 0, threading.Event()
        self._at: int | None = None
        self._lock = threading.Lock()

    def notify_at(self, call: int) -> None:
        with self._lock:
            self.calls, self._at = 0, call
            self.reached.clear()

    def _begin(self) -> None:
        with self._lock:
            if self._at is not None and self.calls >= self._at:
                self.reached.set()
            self.calls += 1
        time.sleep(self.latency_s)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> bytes:
        self._begin()
        return self.store.get(key, begin, end)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._begin()
        self.store.put(key, data)

    def create(self, key: str, data: bytes) -> None:
        self._begin()
        self.store.create(key, data)

    def list(self, prefix: str) -> Iterator[ObjectEntry]:
        self._begin()
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self._begin()
        self.store.delete(key)


# Workers, and everything between


def follow(location: str, cache: str | None, done: str, follow_replaced: bool = False) -> None:
    """Sync again and again, and report the hash of the local weights each time that they changed."""
    local = {name: np.zeros_like(bits) for name, bits in state_after(0).items()}
    subscriber = Subscriber(location, cache=cache, epoch_patches=EPOCH_PATCHES)
    while True:
        began = time.monotonic()
        try:
            report = subscriber.sync(local, wait_s=60, follow_replaced=follow_replaced)
        except StoreError as e:
            if not e.retryable:
                raise
            time.sleep(0.02)
            continue
        except PulseError as e:
            say("refused", error=type(e).__name__, version=subscriber.version)
            raise
        say("synced", version=report.version, step=report.step, path=report.path, began=began, hash=hash_of(local))
        if Path(done).exists() and report.step == int(Path(done).read_text()):
            subscriber.verify(local)
            say("finished", step=report.step)
            return
        time.sleep(0.005)


def replay(location: str) -> None:
    """Follow a run from its first version to its last, and report the hash of the weights at each of them."""
    store = open_store(location)
    local = {name: np.zeros_like(bits) for name, bits in state_after(0).items()}
    subscriber = Subscriber(store, epoch_patches=EPOCH_PATCHES)
    for entry in list(store.list("manifests/")):
        report = subscriber.sync(local, version=int(entry.key.removeprefix("manifests/")))
        say("replayed", version=report.version, step=report.step, hash=hash_of(local))
    say("replayed all")


def squash(location: str) -> None:
    squasher = Squasher(location, epoch_patches=EPOCH_PATCHES)
    while True:
        squasher.run()
        time.sleep(0.05)


def serve(folder: str, port: int) -> None:
    from pulsesync.cli import main

    sys.argv = ["pulse", "serve", folder, "--port", str(port), "--json"]
    main()


def relay(upstream: str, cache: str, port: int) -> None:
    from pulsesync.cli import main

    sys.argv = ["pulse", "relay", upstream, "--cache", cache, "--port", str(port), "--json"]
    main()


def _replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    new.rename(path)


ROLES: dict[str, Any] = {
    "publisher": publish,
    "exiting publisher": publish_and_exit,
    "refused publisher": publish_until_it_raises,
    "follower": follow,
    "replayer": replay,
    "squasher": squash,
    "server": serve,
    "relay": relay,
}


def play(role: str, name: str, **order: Any) -> None:
    """Play a role; what it raises is written down, and ends the interpreter as it would anywhere."""
    logging.getLogger("pulsesync").addHandler(WitnessHandler())
    say("started", name=name)
    try:
        ROLES[role](**order)
    except AnotherPublisherError:
        sys.exit(4)
    except PulseError as e:
        say("stopped", error=type(e).__name__)
        traceback.print_exc()
        sys.exit(3)
