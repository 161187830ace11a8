"""Wrong arguments of public entries: each is refused where it is given, by an error that names it.

`WRONG` has wrong values by the name of an argument. Every argument of every entry is there or in `UNCHECKED`, and every
public name that can be called is an entry or in `NO_ENTRY`, so that one that is added needs a place.
"""

import inspect
import math
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import pulsesync as pulse
from pulsesync import loco, metrics, quantized, server, store
from pulsesync.integrations import delta_folder, folder, frameworks, sglang, vllm
from pulsesync.maintain import prune, squash, verify
from pulsesync.store import CachedStore, LocalStore, MemoryStore, RetryStore, ThrottledStore, WrappedStore
from tools.lint.arguments import RETURNED

KEY = pulse.SigningKey("11" * 32)
COUNTS = ["3", 1.5, -1, True]
SECONDS = ["3", None, -1.0, math.nan]
FOLDERS = [3, b"folder", ""]
KEYS = ["trainer.pub", b"11" * 32, [], ["ab" * 31], 3, {"key": 3}, KEY]

WRONG: dict[str, list[Any]] = {
    "location": [None, 3, b"run"],
    "version": COUNTS,
    "first": COUNTS,
    "step": COUNTS,
    "trust": KEYS,
    "trust_pointers": KEYS,
    "signing_key": ["trainer.key", "11" * 32, b"key", Path("trainer.key")],
    "cache": FOLDERS,
    "spool": FOLDERS,
    "folder": [None, *FOLDERS],
    "undo": COUNTS,
    "verify_every": COUNTS,
    "max_staleness": COUNTS,
    "keep_versions": [*COUNTS, 0],
    "max_lag": COUNTS,
    "max_behind": [*COUNTS, 0],
    "max_failures": [*COUNTS, 0],
    "publish_every": [*COUNTS[1:], 0, "often"],
    "min_tile": [*COUNTS, 0],
    "max_bytes": COUNTS,
    "port": [*COUNTS, 70_000],
    "sync_every": [*COUNTS, 0],
    "delay": COUNTS,
    "trainers": [*COUNTS, 0],
    "quorum": [*COUNTS, 0, 9],
    "state_every": [*COUNTS, 0],
    "follow": ["Stable", 3, b"stable", ""],
    "pointer": ["Stable", 3, b"stable", ""],
    "name": ["Stable", 3, b"stable", "", None],
    "heartbeat": ["a b", 3, ""],
    "trainer": ["a b", 3, "", None],
    "confirm": ["yes", 3],
    "on_round": ["yes", 3],
    "listener": ["log", None],
    "wait_s": SECONDS,
    "hold_s": SECONDS,
    "interval_s": SECONDS,
    "max_interval_s": SECONDS,
    "every_s": SECONDS,
    "max_age_s": SECONDS,
    "deadline_s": SECONDS,
    "patience_s": SECONDS,
    "poll_s": SECONDS,
    "latency_s": SECONDS,
    "keep_hours": SECONDS,
    "grace_hours": SECONDS,
    "anchor_every": SECONDS,
    "blend": SECONDS,
    "momentum": SECONDS,
    "timeout_s": [*SECONDS, 0],
    "bytes_per_s": [*SECONDS, 0],
    "lr": [*SECONDS, 0],
    "link": ["1gbit", 0, -1.0, math.nan],
    "codec": ["zip", 3, []],
    "anchor_codec": ["zip", 3, []],
    "dtype": ["BF17", 3],
    "device": ["moon", 3],
    "keep": ["nowhere", 3],
    "kv_cache": ["burn", 3],
    "plain": ["moon", 3],
    "recipe": ["fp3", None],
    "encoding": ["zip", 3],
    "checksum": ["crc", 3],
    "files": ["config.json", [b""]],
    "slices": ["w", [("w", None)]],
    "grid": ["w", [("w", 2)]],
    "rows": [3, "all", (3,), (0, 1.5), (0, "1")],
    "columns": [3, "all", (3,), (0, 1.5), (0, "1")],
    "secret": [3, None, b"11" * 32, "11", "trainer.key"],
    "public": [3, None, "key", "11" * 31],
    "run": [3, None, "run", "11" * 15],
    "url": [3, None, "ftp://host", "host"],
}

UNCHECKED = {
    "a flag, whose truth is taken": {
        "verify", "follow_replaced", "widen", "wait", "now", "coalesce", "nesterov", "to", "resume", "take_over",
        "api_key_in_clear",
    },
    "tensors: what is wrong with them is an error of its own": {"source", "weights", "model", "inner_optimizer"},
    "for tests and measurements alone": {
        "epoch_patches", "executor", "clock", "sleep", "options",
    },
    "made by the caller, of a class of this or another library": {
        "team", "store", "server", "delegation", "progress", "exchange", "outer", "registry", "base",
    },
    "checked by the publisher's own tests": {"cast"},
    "tests/store checks it, because an error must not show it": {"token"},
    "what an earlier process or a server gave": {"history", "api_key", "host"},
}  # fmt: skip
NO_ENTRY = {
    "it passes all arguments on to an entry": {
        "ShardedPublisher", "FrameworkSubscriber", "DiLoCo", "DDP", "PublishedPulseLoCo", "Nesterov", "relay",
    },
    "it needs a process group, whose tests check it": {"Broadcast", "Collective", "GroupExchange"},
    "it needs another library, whose adapter's tests check it": {
        "attach", "OfflineFollower", "Routes", "load", "OpenTelemetryMetrics", "PrometheusMetrics", "serve", "make_app",
    },
    "tests/store checks it": {"HttpStore", "ObjectStore", "ServedFolder"},
    "what is wrong with tensors or their places is an error of its own": {
        "Placed", "tensor_parallel", "quantize", "published_tensors", "Recipe",
    },
    "a record, a protocol, or a function of a record or a store": {
        "Delegation", "Instrument", "scalars", "emit", "forget", "origin_of", "size_of", "request", "reading",
        "FrameworkWeights", "Exchange", "Store", "MemoryStore", "Listener", "PruneReport",
    },
}  # fmt: skip
PUBLIC = (pulse, store, quantized, loco, metrics, squash, prune, verify, folder, delta_folder, sglang, vllm)
EXEMPT = set().union(*UNCHECKED.values())


@cache
def published() -> MemoryStore:
    store = MemoryStore()
    with pulse.Publisher(store) as publisher:
        publisher.publish(weights())
    return store


@cache
def subscriber() -> pulse.Subscriber:
    sub = pulse.Subscriber(published())
    sub.sync(weights())
    return sub


def weights() -> dict[str, Any]:
    return {"w": np.zeros(4, np.float32)}


def empty() -> str:
    return tempfile.mkdtemp(dir=PLACE[0])


PLACE: list[Path] = []  # of the folders that tests make


def publish(step: int) -> None:
    with pulse.Publisher(MemoryStore()) as publisher:
        publisher.publish(weights(), step=step)


def watch(**given: Any) -> None:
    next(subscriber().watch(weights(), **given))


def scrub(every_s: float) -> None:
    with subscriber().scrub(every_s):
        pass


def keep_folder(version: int) -> None:
    with folder.HuggingFaceFolder(published(), empty()) as kept:
        kept.update(version)


def loco_trainer(**given: Any) -> None:
    torch, never_called = pytest.importorskip("torch"), cast(loco.Exchange, None)
    model = torch.nn.Linear(2, 2)
    loco.PulseLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=never_called, **given)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    PLACE[:] = [tmp_path]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield
    assert not any((tmp_path / "here").iterdir()), "a wrong argument was taken for a path"


Entry = tuple[Callable[..., Any], dict[str, Callable[[], Any]]]  # what is called, and how its good arguments are made

RUN: dict[str, Callable[[], Any]] = {"location": published}
SIGNED: dict[str, Callable[[], Any]] = {"trust": lambda: KEY.public}
ENTRIES: dict[str, Entry] = {
    "Subscriber": (pulse.Subscriber, RUN | SIGNED),
    "Subscriber.sync": (lambda **given: subscriber().sync(weights(), **given), {}),
    "Subscriber.watch": (watch, {}),
    "Subscriber.scrub": (scrub, {}),
    "Subscriber.resume": (lambda **given: subscriber().resume(weights(), history=None, **given), {}),
    "Publisher": (pulse.Publisher, RUN),
    "Publisher.publish": (publish, {}),
    "move_pointer": (pulse.move_pointer, RUN | SIGNED | {"name": lambda: "stable", "version": lambda: 0}),
    "read_pointers": (pulse.read_pointers, RUN | SIGNED),
    "read_fleet": (pulse.read_fleet, RUN | SIGNED),
    "open_store": (pulse.open_store, {}),
    "listen": (pulse.listen, {"listener": lambda: print}),
    "warm_up": (pulse.warm_up, {}),
    "SigningKey": (pulse.SigningKey, {}),
    "SigningKey.delegate": (KEY.delegate, {"run": lambda: "ab" * 16, "public": lambda: KEY.public}),
    "Slice": (pulse.Slice, {}),
    "CachedStore": (CachedStore, {"store": MemoryStore, "folder": empty}),
    "LocalStore": (LocalStore, {}),
    "RetryStore": (RetryStore, {"store": MemoryStore}),
    "ThrottledStore": (ThrottledStore, {"store": MemoryStore, "bytes_per_s": lambda: 1}),
    "WrappedStore": (WrappedStore, {"store": MemoryStore}),
    "QuantizedSubscriber": (
        quantized.QuantizedSubscriber,
        RUN | SIGNED | {"recipe": lambda: next(iter(quantized.RECIPES))},
    ),
    "Squasher": (squash.Squasher, RUN),
    "prune": (prune.prune, {"store": published} | SIGNED),
    "RunVerifier": (verify.RunVerifier, RUN | SIGNED),
    "export": (metrics.export, {}),
    "HuggingFaceFolder": (folder.HuggingFaceFolder, RUN | SIGNED | {"folder": empty}),
    "HuggingFaceFolder.update": (keep_folder, {}),
    "DeltaExporter": (delta_folder.DeltaExporter, RUN | SIGNED | {"folder": empty}),
    "DeltaImporter": (delta_folder.DeltaImporter, RUN | {"folder": empty}),
    "VllmServer": (vllm.VllmServer, {"url": lambda: "http://127.0.0.1:1"}),
    "SglangServer": (sglang.SglangServer, {"url": lambda: "http://127.0.0.1:1"}),
    "ServerFollower": (
        vllm.ServerFollower,
        SIGNED | {"server": lambda: vllm.VllmServer("http://h"), "location": lambda: "memory://x", "store": published},
    ),
    "PulseLoCo": (loco_trainer, {}),
    "StoreExchange": (loco.StoreExchange, {"location": MemoryStore, "trainer": lambda: "a", "trainers": lambda: 2}),
    "SGD": (loco.SGD, {"lr": lambda: 1.0}),
}
SIGNATURES: dict[str, Callable[..., Any]] = {  # of entries that a function of this file calls
    "Subscriber.sync": pulse.Subscriber.sync,
    "Subscriber.watch": pulse.Subscriber.watch,
    "Subscriber.resume": pulse.Subscriber.resume,
    "Publisher.publish": pulse.Publisher.publish,
    "PulseLoCo": loco.DiLoCo,
}
CASES = [
    (entry, name)
    for entry, (call, _) in ENTRIES.items()
    for name in inspect.signature(SIGNATURES.get(entry, call)).parameters
    if name not in EXEMPT and name != "self" and not name.startswith("_")
]


def test_every_public_name_that_takes_arguments_is_an_entry_or_has_a_reason() -> None:
    placed = {entry.partition(".")[0] for entry in ENTRIES}.union(RETURNED, *NO_ENTRY.values())
    modules: list[Any] = [*PUBLIC, frameworks, server]
    for module in modules:
        for name in module.__all__:
            value: Any = getattr(module, name)
            is_error = inspect.isclass(value) and issubclass(value, BaseException)
            if callable(value) and not is_error and inspect.signature(value).parameters:
                assert name in placed, f"{module.__name__}.{name}"


@pytest.mark.parametrize(("entry", "name"), CASES, ids=lambda part: part)
def test_a_wrong_argument_is_refused_where_it_is_given(entry: str, name: str) -> None:
    call, good = ENTRIES[entry]
    said = {"secret": "signing key", "trainer": "trainer", "location": "location"}.get(name, name)
    if name in ("follow", "pointer", "name", "heartbeat"):
        said = "name of a"
    for value in WRONG[name]:
        given = {argument: make() for argument, make in good.items() if argument != name}
        with pytest.raises((TypeError, ValueError), match=r"must ") as caught:
            call(**given, **{name: value})
        error = str(caught.value)
        assert said in error, error
        if name not in ("secret", "signing_key"):
            assert "got " in error, error
        else:
            assert str(value) == "11" or str(value) not in error, "a secret must not be shown"
