"""The trials: each starts real processes, does its worst, and returns what was counted."""

import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pulsesync.errors import StoreError
from pulsesync.store import open_store
from tests.chaos.ledger import Counts, balance
from tests.chaos.proxy import Proxy
from tests.chaos.training import STEPS
from tests.chaos.zoo import Zoo
from tests.processes import Fleet
from tests.s3 import Server, free_ports

TRANSPORTS = ["folder", "s3", "relays"]
MODES = ["wait", "background", "every-step"]
BETWEEN_S = 0.1  # kills, on average
CONCURRENT_EXITS = 4  # processes, each with a run of its own: most of their time they wait for a slow store
DEADLINE_S = 100.0
Trial = Callable[[Fleet, Path, Server], Counts]


def killed(transport: str, kills: int, seed: int = 5) -> Trial:
    """Kill publishers, followers, a squasher, a server and relays with SIGKILL at random moments."""

    def trial(fleet: Fleet, folder: Path, s3: Server) -> Counts:
        rng = random.Random(seed)
        with _transport(fleet, transport, folder, s3) as (zoo, write, read):
            finish, done = folder / "finish", folder / "done"
            zoo.start(
                "publisher",
                role="publisher",
                location=write,
                spool=str(folder / "spool"),
                mode=rng.choice(MODES),
                checkpoint=str(folder / "checkpoint"),
                finish=str(finish),
                done=str(done),
            )
            followers = [f"follower{i}" for i in range(3)]
            for i, name in enumerate(followers):
                cache = str(folder / "shared") if i < 2 else None
                zoo.start(name, role="follower", location=read, cache=cache, done=str(done))
            zoo.start("squasher", role="squasher", location=write)

            def revive() -> bool:
                """Start again every process that has died; after the end, none that may have finished."""
                for name in zoo.pids:
                    if not zoo.alive(name) and not done.exists():
                        zoo.again(name, **({"mode": rng.choice(MODES)} if name == "publisher" else {}))
                return True

            while zoo.kills < kills:
                time.sleep(rng.expovariate(1 / BETWEEN_S))
                zoo.kill(rng.choice(list(zoo.pids)))
                revive()
            zoo.wait_until(lambda: revive() and _all_patched(zoo, followers), DEADLINE_S, "every follower to follow")
            finish.touch()
            zoo.wait_until(
                lambda: revive() and done.exists() and not any(zoo.alive(name) for name in followers),
                DEADLINE_S,
                "the run and its followers to end",
            )
            last = int(done.read_text())
            for name in followers:
                assert zoo.witness.wait_for("finished", 10, pid=zoo.pids[name])["step"] == last
            assert "Traceback" not in zoo.errors(), zoo.errors()
            # A worker that joins now loads an anchor through the temporary folder, and removes what the killed
            # processes left there.
            zoo.start("joiner", role="follower", location=read, cache=None, done=str(done))
            zoo.wait_until(lambda: not zoo.alive("joiner"), DEADLINE_S, "a late joiner")
            assert zoo.exit_code("joiner") == 0, zoo.errors()
            assert not list((folder / "tmp").glob("pulse-*")), "temporary folders of killed processes were not removed"
            return balance(f"kill -9, {transport}", zoo, write)

    return trial


def ended(points: int, how: tuple[str, ...] = ("return", "exit", "raise")) -> Trial:
    """Let the interpreter end at every point of some versions: while any one of the store's calls is under way."""

    def trial(fleet: Fleet, folder: Path, _s3: Server) -> Counts:
        counts = Counts("the interpreter ends, folder")
        with Zoo(fleet, folder) as zoo:
            cases = [(point, way, folder / f"run-{point}-{way}") for point in range(points) for way in how]
            for first in range(0, len(cases), CONCURRENT_EXITS):
                runs = {}
                for point, way, run in cases[first : first + CONCURRENT_EXITS]:
                    runs[name := f"publisher {point} {way}"] = run
                    zoo.start(name, role="exiting publisher", location=str(run), ends_at=point, how=way, steps=6)
                zoo.join(*runs, timeout_s=30)
                for name, run in runs.items():
                    counts += balance("", zoo, str(run), names=[name])
                    counts.exits += 1
                    shutil.rmtree(run)
        return counts

    return trial


def refused(transport: str, mode: str, steps: int = 12) -> Trial:
    """A store that fails for good from one step on: S3 answers 403, or the disk takes nothing more."""

    def trial(fleet: Fleet, folder: Path, s3: Server) -> Counts:
        at = urlsplit(s3.endpoint)
        with ExitStack() as stack:
            proxy = stack.enter_context(Proxy(str(at.hostname), int(at.port or 0)))
            on_s3 = transport == "s3"
            location = s3.fresh_url() if on_s3 else str(folder / "run")
            zoo = stack.enter_context(Zoo(fleet, folder, {**s3.environment, "AWS_ENDPOINT_URL": proxy.url}))
            zoo.start(
                "publisher",
                role="refused publisher",
                location=location,
                mode=mode,
                steps=steps,
                fails_at=3,
                disk_is_full=not on_s3,
            )
            if on_s3:
                zoo.witness.wait_for("ready", 30)
                proxy.mode = "refuse"
            zoo.join("publisher", timeout_s=60)
            proxy.mode = "pass"
            counts = balance(f"the store fails for good, {transport}, {mode}", zoo, location)
            # With wait=True every publish has raised by itself, and closing has nothing to add.
            closing = mode == "wait" or zoo.witness.said("raised", call="close")
            assert closing, f"close() returned cleanly although versions are missing:\n{zoo.errors()}"
            return counts

    return trial


def hung(seconds: float) -> Trial:
    """S3 hangs, drops connections and comes back while a publisher publishes and a follower follows."""

    def trial(fleet: Fleet, folder: Path, s3: Server) -> Counts:
        at = urlsplit(s3.endpoint)
        done, finish = folder / "done", folder / "finish"
        with (
            Proxy(str(at.hostname), int(at.port or 0)) as proxy,
            Zoo(fleet, folder, {**s3.environment, "AWS_ENDPOINT_URL": proxy.url}) as zoo,
        ):
            location = s3.fresh_url()
            zoo.start(
                "publisher",
                role="publisher",
                location=location,
                spool=str(folder / "spool"),
                mode="background",
                checkpoint=str(folder / "checkpoint"),
                finish=str(finish),
                done=str(done),
            )
            zoo.start("follower", role="follower", location=location, cache=None, done=str(done))
            zoo.wait_until(lambda: _all_patched(zoo, ["follower"]), 30, "the follower to follow")
            for mode in ("hang", "drop", "hang"):
                proxy.mode = mode
                time.sleep(seconds)
                proxy.mode = "pass"
                time.sleep(0.5)
            finish.touch()
            zoo.join("publisher", "follower", timeout_s=DEADLINE_S)
            return balance("the store hangs and drops, s3", zoo, location)

    return trial


def slow_server() -> Trial:
    """A server that sends one byte every 0.4 s, or nothing: readers end with an error that names it, in seconds."""

    def trial(fleet: Fleet, folder: Path, _s3: Server) -> Counts:
        from pulsesync.store import HttpStore

        (port,) = free_ports(1)
        counts = Counts("a server that trickles or hangs, http")
        with Zoo(fleet, folder) as zoo:
            _publish_some(zoo, folder, steps=6)
            zoo.start("server", role="server", folder=str(folder / "run"), port=port)
            _wait_for_server(zoo, f"http://127.0.0.1:{port}")
            with Proxy("127.0.0.1", port) as proxy:
                for mode in ("trickle", "hang"):
                    proxy.mode = mode
                    began = time.monotonic()
                    with pytest.raises(StoreError) as raised:
                        HttpStore(proxy.url, timeout_s=1).get("head")
                    took = time.monotonic() - began
                    assert raised.value.retryable, raised.value
                    counts.refused += 1
                    assert took < 10, f"a read from a server in mode {mode} took {took:.0f} s"
            return counts + balance("", zoo, str(folder / "run"))

    return trial


def replaced() -> Trial:
    """The folder is emptied and another run is published into it while workers follow."""

    def trial(fleet: Fleet, folder: Path, _s3: Server) -> Counts:
        run, done = folder / "run", folder / "done"
        with Zoo(fleet, folder) as zoo:
            _publish_some(zoo, folder, steps=9)
            zoo.start("plain", role="follower", location=str(run), cache=None, done=str(done))
            zoo.start("cached", role="follower", location=str(run), cache=str(folder / "cache"), done=str(done))
            zoo.start("moves on", role="follower", location=str(run), cache=None, done=str(done), follow_replaced=True)
            for name in ("plain", "cached", "moves on"):
                zoo.witness.wait_for("synced", 30, pid=zoo.pids[name], step=8)
            shutil.rmtree(run)
            _publish_some(zoo, folder, steps=5, first=STEPS)
            replaced_at = zoo.witness.said("resolved", step=STEPS + 4)[-1]["at"]
            done.write_text(str(STEPS + 4))
            zoo.join("plain", "cached", "moves on", timeout_s=30)
            _refused_by_name(zoo, "plain", "cached")
            assert zoo.witness.said("finished", pid=zoo.pids["moves on"], step=STEPS + 4), zoo.errors()
            counts = balance("the run is replaced, folder", zoo, str(run), kept=False)
            counts.wrong_weights += _stale(zoo, replaced_at, STEPS)
            return counts

    return trial


def restored() -> Trial:
    """The store is set back to a backup, and the publisher resumes from there with other weights."""

    def trial(fleet: Fleet, folder: Path, _s3: Server) -> Counts:
        run, backup, done = folder / "run", folder / "backup", folder / "done"
        with Zoo(fleet, folder) as zoo:
            _publish_some(zoo, folder, steps=6)
            shutil.copytree(run, backup)
            _publish_some(zoo, folder, steps=11, again=True)
            for name, moves_on in (("plain", False), ("moves on", True)):
                zoo.start(
                    name, role="follower", location=str(run), cache=None, done=str(done), follow_replaced=moves_on
                )
                zoo.witness.wait_for("synced", 30, pid=zoo.pids[name], step=10)
            shutil.rmtree(run)
            backup.rename(run)
            _publish_some(zoo, folder, steps=9, first=STEPS)
            restored_at = zoo.witness.said("resolved", step=STEPS + 8)[-1]["at"]
            done.write_text(str(STEPS + 8))
            zoo.join("plain", "moves on", timeout_s=30)
            _refused_by_name(zoo, "plain")
            assert zoo.witness.said("finished", pid=zoo.pids["moves on"], step=STEPS + 8), zoo.errors()
            counts = balance("the store is restored from a backup, folder", zoo, str(run), kept=False)
            counts.wrong_weights += _stale(zoo, restored_at, STEPS)
            return counts

    return trial


# Parts of trials


@contextmanager
def _transport(fleet: Fleet, name: str, folder: Path, s3: Server) -> Iterator[tuple[Zoo, str, str]]:
    """Processes without a publisher yet; where it publishes, and where followers read."""
    write = read = s3.fresh_url() if name == "s3" else str(folder / "run")
    with Zoo(fleet, folder, s3.environment if name == "s3" else None) as zoo:
        if name == "relays":
            Path(write).mkdir()
            ports = free_ports(3)
            zoo.start("server", role="server", folder=write, port=ports[0])
            for i in (1, 2):
                upstream, cache = f"http://127.0.0.1:{ports[i - 1]}", str(folder / f"relay{i}")
                zoo.start(f"relay{i}", role="relay", upstream=upstream, cache=cache, port=ports[i])
            read = f"http://127.0.0.1:{ports[2]}"
        yield zoo, write, read


def _publish_some(zoo: Zoo, folder: Path, steps: int, first: int = 0, again: bool = False) -> None:
    """Publish a few versions into the folder `run` from a process that ends; again: resume from its checkpoint."""
    checkpoint = folder / f"checkpoint{first}"
    name = f"publisher{len(zoo.pids)}"
    zoo.start(
        name,
        role="publisher",
        location=str(folder / "run"),
        spool=str(folder / f"spool{first}-{steps}"),
        mode="wait",
        checkpoint=str(checkpoint),
        finish=str(folder / "never"),
        done=str(folder / "published"),
        first=first,
        steps=steps,
    )
    zoo.join(name, timeout_s=60)
    assert zoo.exit_code(name) == 0, zoo.errors()


def _wait_for_server(zoo: Zoo, url: str) -> None:
    def answers() -> bool:
        try:
            open_store(url).get("head")
        except StoreError:
            return False
        return True

    zoo.wait_until(answers, 30, f"{url} to answer")


def _all_patched(zoo: Zoo, followers: list[str]) -> bool:
    """Whether each of these followers, whatever its process, has applied a patch."""
    pids = {name: {line["pid"] for line in zoo.witness.said("started", name=name)} for name in followers}
    patched = {line["pid"] for line in zoo.witness.said("synced") if "patch" in line["path"]}
    return all(pids[name] & patched for name in followers)


def _refused_by_name(zoo: Zoo, *followers: str) -> None:
    """Followers must have ended with an error that says that this is not the run they followed."""
    for name in followers:
        error = zoo.witness.wait_for("refused", 10, pid=zoo.pids[name])["error"]
        assert error in ("RunReplacedError", "RunForkedError", "RunRolledBackError"), error


def _stale(zoo: Zoo, since: float, first: int) -> int:
    """Syncs that began after another run had taken the place, and reported weights of the one before."""
    return sum(line["began"] > since and line["step"] < first for line in zoo.witness.said("synced"))
