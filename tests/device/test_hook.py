"""No base is kept: the trainer hands over old and new, and the run is the one that a base would have made."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import Event
from typing import Any

import pytest
import torch

from pulsesync import Publisher, Subscriber
from pulsesync.device.baseline import DeviceBaseline, DeviceDifference
from pulsesync.device.hook import HookState
from pulsesync.errors import StateError, StoreError
from pulsesync.format.patch import EncodedPart
from pulsesync.publish import anchors
from pulsesync.publish.baseline import Keep
from pulsesync.publish.pending import PublishReport
from pulsesync.run import keys
from pulsesync.store import MemoryStore
from tests.backends import host_as_device
from tests.device.test_baseline import Model, equal, kept, objects, on, read
from tests.publish.test_sharded import Group, by_rows
from tests.runs import Watched, version, versions
from tests.tiers import slow

pytestmark = pytest.mark.usefixtures("parts_as_objects")

KEEPS: tuple[Keep, Keep] = ("hook", "device")


class Trainer:
    """FP32 masters and a BF16 model, as an optimizer has them: new and old for a moment."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(1)
        made = {"a": torch.randn(6, 5, generator=generator) * 0.02, "i": torch.arange(7), "n": torch.ones(3)}
        self.masters = {name: tensor.to(device) for name, tensor in made.items()}
        self.model = self.cast()
        self.step = 0

    def cast(self) -> Model:
        """What is to be published: a copy."""
        return {n: t.bfloat16() if t.dtype == torch.float32 else t.clone() for n, t in self.masters.items()}

    def update_(self) -> None:
        """Move the masters."""
        self.step += 1
        self.masters["a"][self.step % 6] *= 1.01
        self.masters["a"][(self.step + 1) % 6] *= 1 + 2**-14  # hardly any of these is seen
        self.masters["i"][self.step % 7] += 1

    def follow_(self) -> None:
        """Bring the model to the masters."""
        for name, tensor in self.model.items():
            tensor.copy_(self.masters[name])

    def publish(self, pub: Publisher, **options: Any) -> "Future[PublishReport]":
        """One step of a training: the masters move, both are published, and the model follows at once."""
        self.update_()
        future = pub.publish(self.masters, old=self.model, step=self.step, wait=False, **options)
        self.follow_()
        return future


@pytest.fixture
def trainer(device: str) -> Iterator[Trainer]:
    with on(device):
        yield Trainer(device)


def hooked(store: Any, **options: Any) -> Publisher:
    return Publisher(store, **{"keep": "hook", "cast": "BF16", "codec": "gap", **options})


def on_host() -> AbstractContextManager[None]:
    """Where nothing is taken for a device, inside a block where it is: workers here are on the host, which is quick."""
    return host_as_device(on=False)


def read_on_host(store: Any, number: int, like: Model, **options: Any) -> Model:
    with on_host():
        return read(store, number, kept(like), **options)


# Versions


def test_versions_are_the_masters_cast_while_the_trainer_goes_on(trainer: Trainer) -> None:
    store, states = MemoryStore(), [trainer.cast()]
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        futures = []
        for _ in range(2):
            futures.append(trainer.publish(pub))
            states.append(trainer.cast())
            trainer.masters["a"].mul_(3)  # what comes after the call is not published
            trainer.masters["a"].copy_(trainer.model["a"])
        assert [future.result(30).version for future in futures] == [1, 2]
        assert pub.version == 2
    for number, state in enumerate(states):
        assert equal(read_on_host(store, number, state), kept(state))


def test_the_bytes_are_those_of_a_base_on_the_device(device: str, trainer: Trainer, many_lanes: None) -> None:
    """Of a codec that remembers, over an epoch's first patches."""
    other, stores = Trainer(device), [MemoryStore(), MemoryStore()]
    options: dict[str, Any] = {"codec": "history", "cast": "BF16"}
    with Publisher(stores[0], keep="hook", **options) as hook, Publisher(stores[1], keep="device", **options) as base:
        hook.publish(trainer.masters)
        base.publish(other.masters)
        for _ in range(2):
            mine = trainer.publish(hook).result(30)
            other.update_()
            theirs = base.publish(other.masters, step=other.step)
            assert (mine.version, mine.changed) == (theirs.version, theirs.changed)
            assert 0 < mine.changed < mine.total
        assert hook.digest == base.digest
    assert objects(stores[0]) == objects(stores[1])
    assert version(stores[0], 2).history == version(stores[1], 2).history is not None


def test_nothing_of_the_weights_is_kept_between_publishes(trainer: Trainer) -> None:
    with hooked(MemoryStore()) as pub:
        pub.publish(trainer.masters)
        for _ in range(3):
            assert pub._base is not None
            assert isinstance(pub._base.state, HookState)
            assert (pub._base.state.flats, pub._base.state.memory.readers) == ({}, [])  # nor of what read them
            trainer.publish(pub).result(30)


def test_waiting_is_the_same(trainer: Trainer) -> None:
    store = MemoryStore()
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        trainer.update_()
        assert pub.publish(trainer.masters, old=trainer.model, step=1).version == 1
        trainer.follow_()
        assert pub.publish(trainer.masters, old=trainer.model, step=2).changed == 0
    assert equal(read_on_host(store, 2, trainer.model), kept(trainer.model))


def test_a_version_goes_before_the_next_is_compared(trainer: Trainer) -> None:
    """Versions are not coalesced: `old` is the previous version, so that version must be committed first."""
    store, arrived, go = Watched(), Event(), Event()

    def hold(verb: str, key: str) -> None:
        if key.startswith(keys.manifest_key(1)):
            arrived.set()
            assert go.wait(30)

    with hooked(store) as pub:
        pub.publish(trainer.masters)
        store.before = hold
        first = trainer.publish(pub)
        assert arrived.wait(30)
        assert not first.done()
        go.set()
        second = trainer.publish(pub)
        assert first.done()
        assert second.result(30).coalesced == 0
    assert versions(store) == [0, 1, 2]
    assert equal(read_on_host(store, 2, trainer.model), kept(trainer.model))


# What is refused


def test_old_weights_that_are_not_the_last_version_are_refused(trainer: Trainer) -> None:
    store = Watched()
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        wrong = {name: tensor.clone() for name, tensor in trainer.model.items()}
        wrong["a"].view(torch.int16)[2, 3] ^= 1
        trainer.update_()
        store.writes.clear()
        for old in (wrong, {**trainer.model, "n": trainer.model["n"].float()}, {"a": trainer.model["a"]}):
            with pytest.raises(StateError, match="old weights"):
                pub.publish(trainer.masters, old=old, step=1, wait=False)
        assert (store.writes, pub.version) == ([], 0)
        assert pub.publish(trainer.masters, old=trainer.model, step=1).version == 1  # the right ones are accepted
        trainer.follow_()
    assert equal(read_on_host(store, 1, trainer.model), kept(trainer.model))


def test_a_step_that_was_not_handed_over_is_refused(trainer: Trainer) -> None:
    with hooked(MemoryStore()) as pub:
        pub.publish(trainer.masters)
        trainer.update_()
        trainer.follow_()
        with pytest.raises(StateError, match="pass the weights of every step"):
            trainer.publish(pub)
        assert pub.version == 0


def test_without_old_weights_nothing_can_be_compared(trainer: Trainer) -> None:
    with hooked(MemoryStore()) as pub:
        pub.publish(trainer.masters)
        with pytest.raises(ValueError, match="old="):
            pub.publish(trainer.masters, step=1)
        assert pub.version == 0


@pytest.mark.parametrize("keep", [None, "device", "host"])
def test_old_weights_are_for_publishers_that_keep_none(keep: Any, trainer: Trainer) -> None:
    with hooked(MemoryStore(), keep=keep) as pub:
        pub.publish(trainer.masters)
        with pytest.raises(ValueError, match="old= is for a Publisher with keep='hook'"):
            trainer.publish(pub)
        assert pub.version == 0


@pytest.mark.parametrize("every", [2, "auto"])
def test_steps_cannot_be_left_out(every: Any) -> None:
    with pytest.raises(ValueError, match="publishes every step"):
        Publisher(MemoryStore(), keep="hook", publish_every=every)


# Faults


@pytest.mark.parametrize("at", ["manifests/", slow("parts/")])
def test_after_a_send_that_failed_a_root_comes_next(at: str, trainer: Trainer) -> None:
    store = Watched()
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        trainer.publish(pub).result(30)
        store.fail_at(at)
        assert isinstance(trainer.publish(pub).exception(30), StoreError)
        store.fail_at()
        report = trainer.publish(pub).result(30)
        state = trainer.cast()
        assert (report.version, report.changed) == (2, report.total)
        assert version(store, 2).base is None
        later = trainer.publish(pub).result(30)
        assert (later.version, later.changed < later.total) == (3, True)
    follower = {name: torch.zeros_like(tensor) for name, tensor in kept(state).items()}
    with on_host():
        worker = Subscriber(store)
        worker.sync(follower, version=1)
        worker.sync(follower, version=2)
        assert equal(follower, state)
        worker.sync(follower)
        assert equal(follower, trainer.model)
        joiner = {name: torch.zeros_like(tensor) for name, tensor in follower.items()}
        assert Subscriber(store).sync(joiner).path == ("anchor", "patch")
        assert equal(joiner, trainer.model)


@pytest.mark.parametrize("verb", ["encode", slow("compare")])
def test_after_a_comparison_that_failed_a_root_comes_next(
    verb: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    store = MemoryStore()
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        with monkeypatch.context() as patched:
            patched.setattr(DeviceBaseline if verb == "compare" else DeviceDifference, verb, fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                trainer.publish(pub)
        trainer.follow_()  # as a trainer does that goes on
        root = trainer.publish(pub).result(30)
        assert (root.version, root.changed) == (1, root.total)
        later = trainer.publish(pub).result(30)
        assert (later.version, later.changed < later.total) == (2, True)
    assert [version(store, number).base is None for number in range(3)] == [True, True, False]
    assert equal(read_on_host(store, 2, trainer.model), kept(trainer.model))


def test_a_version_of_which_the_store_did_not_say_that_it_has_it_is_not_lost(trainer: Trainer) -> None:
    """It was committed: the root that comes next follows it."""
    store = Watched()

    def fail(verb: str, key: str) -> None:
        if key == keys.manifest_key(1):
            raise StoreError("the line went down after it", key=key)

    with hooked(store) as pub:
        pub.publish(trainer.masters)
        store.after = fail
        trainer.publish(pub).exception(30)
        store.after = lambda verb, key: None
        first = trainer.cast()
        trainer.publish(pub).result(30)
    last = versions(store)[-1]
    assert equal(read_on_host(store, 1, first), kept(first))
    assert equal(read_on_host(store, last, trainer.model), kept(trainer.model))


# Anchors


def test_the_anchor_of_an_epochs_end_is_right_while_the_trainer_goes_on(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made of the masters at that moment, though it is written when they have moved on."""
    store, go, encode_parts = Watched(), Event(), anchors.encode_parts

    def late(*args: Any) -> Iterator[EncodedPart]:
        assert go.wait(30)
        yield from encode_parts(*args)

    def slow(verb: str, key: str) -> None:
        if (verb, key) == ("create", keys.manifest_key(2)):
            time.sleep(0.1)

    with hooked(store, anchor_every=0.0, epoch_patches=2) as pub:
        pub.publish(trainer.masters)
        pub.flush()
        monkeypatch.setattr(anchors, "encode_parts", late)
        store.before = slow
        trainer.masters = {name: tensor.clone() for name, tensor in trainer.masters.items()}
        futures = [trainer.publish(pub) for _ in range(2)]
        state = trainer.cast()
        futures.append(trainer.publish(pub))
        assert [future.result(30).version for future in futures] == [1, 2, 3]
        for tensor in trainer.masters.values():
            tensor.zero_()
        go.set()
        pub.flush()
    for number in (0, 1):
        store.delete(keys.manifest_key(number))  # now the anchor is the only way
    assert equal(read_on_host(store, 2, state, epoch_patches=2), kept(state))
    assert equal(read_on_host(store, 3, trainer.model, epoch_patches=2), kept(trainer.model))


def test_a_publisher_that_begins_again_writes_a_root(trainer: Trainer) -> None:
    store = MemoryStore()
    with hooked(store) as pub:
        pub.publish(trainer.masters)
        trainer.publish(pub).result(30)
        run = pub.run
    with hooked(store) as pub:
        root = trainer.publish(pub).result(30)
        assert (root.version, root.changed, pub.run) == (2, root.total, run)
        assert trainer.publish(pub).result(30).version == 3
    assert version(store, 2).base is None
    assert equal(read_on_host(store, 3, trainer.model), kept(trainer.model))


# Several ranks


class TeamTrainer(Trainer):
    """The same for two ranks, which have rows of each tensor."""

    def publish_all(self, group: Group) -> Any:
        """One step of both: the report."""
        self.update_()
        report = group.publish(self.masters, self.step, old=self.model)
        self.follow_()
        return report


def team(store: Any, keep: Keep, **options: Any) -> Group:
    return Group(store, 2, by_rows, timeout_s=60, keep=keep, cast="BF16", min_tile=1, **options)


def test_the_bytes_of_ranks_are_those_of_bases_on_the_device_and_nothing_is_kept(device: str, many_lanes: None) -> None:
    stores, trainers = [MemoryStore(), MemoryStore()], [TeamTrainer(device), TeamTrainer(device)]
    with on(device):
        hook, base = (team(store, keep, codec="history") for store, keep in zip(stores, KEEPS, strict=True))
        hook.publish(trainers[0].masters)
        base.publish(trainers[1].masters)
        for _ in range(2):
            mine = trainers[0].publish_all(hook)
            trainers[1].update_()
            theirs = base.publish(trainers[1].masters, trainers[1].step)
            assert (mine.version, mine.changed) == (theirs.version, theirs.changed)
            assert 0 < mine.changed < mine.total
        assert hook.pubs[0].digest == base.pubs[0].digest
        assert [pub.base_bytes for pub in hook.pubs] == [0, 0]
        assert all(pub.base_bytes for pub in base.pubs)
        for group in (hook, base):
            group.flush()  # the anchor, too, which a thread writes
    assert objects(stores[0]) == objects(stores[1])


def test_ranks_write_anchors_of_what_was_handed_over(device: str) -> None:
    store, trainer = MemoryStore(), TeamTrainer(device)
    with on(device):
        group = team(store, "hook", codec="gap", anchor_every=0.0, epoch_patches=2)
        group.publish(trainer.masters)
        for _ in range(3):
            trainer.publish_all(group)
        group.flush()
    for number in (0, 1):
        store.delete(keys.manifest_key(number))  # now the anchor is the only path
    state = kept(trainer.cast())
    assert equal(read(store, 3, state, epoch_patches=2), state)


def test_an_anchor_of_ranks_that_failed_is_finished_later_with_the_weights_it_was_begun_with(device: str) -> None:
    store, trainer = Watched(), TeamTrainer(device)
    with on(device):
        group = team(store, "hook", codec="gap", anchor_every=0.0, epoch_patches=2)
        group.publish(trainer.masters)
        trainer.publish_all(group)
        store.fail_at("anchors/")
        assert trainer.publish_all(group).version == 2
        second = kept(trainer.cast())
        assert len(list(store.store.list("anchors/"))) == 1  # that of the root
        store.fail_at()
        assert trainer.publish_all(group).version == 3
        group.flush()
        assert len(list(store.list("anchors/"))) == 2
    for number in (0, 1):
        store.delete(keys.manifest_key(number))  # now the anchor is the only path
    assert equal(read(store, 2, kept(trainer.cast()), epoch_patches=2), second)


def test_ranks_refuse_old_weights_of_another_version_and_continue_with_the_right_ones(device: str) -> None:
    store, trainer = MemoryStore(), TeamTrainer(device)
    with on(device):
        group = team(store, "hook", codec="gap")
        group.publish(trainer.masters)
        wrong = {name: tensor.clone() for name, tensor in trainer.model.items()}
        wrong["a"].view(torch.int16)[5, 3] ^= 1  # which the second rank has
        trainer.update_()
        for one in group.try_publish(trainer.masters, 1, old=wrong):
            assert isinstance(one, StateError)
        assert [pub.version for pub in group.pubs] == [0, 0]
        assert group.publish(trainer.masters, 1, old=trainer.model).changed < 30
    assert equal(read(store, 1, kept(trainer.cast())), kept(trainer.cast()))


def test_after_a_version_of_ranks_that_failed_a_root_comes_next(device: str) -> None:
    store, trainer = Watched(), TeamTrainer(device)
    with on(device):
        group = team(store, "hook", codec="gap")
        group.publish(trainer.masters)
        store.fail_at("manifests/")
        trainer.update_()
        assert all(isinstance(one, StoreError) for one in group.try_publish(trainer.masters, 1, old=trainer.model))
        store.fail_at()
        trainer.follow_()
        root = trainer.publish_all(group)
        assert (root.version, root.changed) == (1, root.total)
        later = trainer.publish_all(group)
        assert (later.version, later.changed < later.total) == (2, True)
    assert equal(read(store, 2, kept(trainer.cast())), kept(trainer.cast()))


def test_old_weights_are_for_teams_that_keep_none(device: str) -> None:
    trainer = TeamTrainer(device)
    with on(device):
        group = team(MemoryStore(), "device")
        group.publish(trainer.masters)
        for one in group.try_publish(trainer.masters, 1, old=trainer.model):
            assert isinstance(one, ValueError)
            assert "old= is for a Publisher with keep='hook'" in str(one)


# On a GPU, where work is queued


@pytest.mark.gpu
@pytest.mark.parametrize("side", [False, True], ids=["default stream", "side stream"])
def test_training_on_at_once_cannot_change_what_is_published(side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work is queued before and after every call, the store is slow, and anchors are written meanwhile."""
    store, futures, states = Watched(), [], []
    store.before = lambda verb, key: time.sleep(0.02)
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    with torch.cuda.stream(stream), hooked(store, codec="auto", anchor_every=0.0, epoch_patches=3) as pub:
        masters = {"a": torch.randn(1 << 23, device="cuda") * 0.02}
        weights = {"a": masters["a"].bfloat16()}
        pub.publish(masters)
        for step in range(8):
            torch.cuda._sleep(20_000_000)
            masters["a"][step::97] *= 1.01
            futures.append(pub.publish(masters, old=weights, step=step, wait=False))
            weights["a"].copy_(masters["a"])
            states.append(weights["a"].view(torch.int16).clone())
            kept_masters = masters["a"].clone()
            for _ in range(20):
                masters["a"].mul_(3)
            masters["a"].copy_(kept_masters)
        masters["a"].zero_()
        assert [future.result(60).version for future in futures] == list(range(1, 9))
        stream.synchronize()
    there, worker = {"a": torch.zeros_like(weights["a"])}, Subscriber(store, epoch_patches=3)
    for number, state in enumerate(states, 1):
        worker.sync(there, version=number)
        assert torch.equal(there["a"].view(torch.int16), state)
    joiner = {"a": torch.zeros_like(weights["a"])}
    for number in range(3):
        store.delete(keys.manifest_key(number))  # only an anchor leads to what follows
    assert Subscriber(store, epoch_patches=3).sync(joiner).version == 8
    assert torch.equal(joiner["a"].view(torch.int16), states[-1])
