"""Workers that follow a pointer, forwards and backwards, and what they do if they are too far from it."""

import logging
import threading
from dataclasses import replace
from typing import Any

import pytest

import pulsesync
from pulsesync import SigningKey, read_pointers
from pulsesync.errors import (
    ChainError,
    FormatError,
    LimitError,
    MissingLinkError,
    NothingPublishedError,
    PulseError,
    RunReplacedError,
    SignatureError,
    StaleWeightsError,
    StoreError,
)
from pulsesync.format import signature
from pulsesync.format.manifest import BaseRef, RecordKind
from pulsesync.format.pointer import MAX_BYTES, Pointer
from pulsesync.maintain.prune import prune
from pulsesync.maintain.verify import RunVerifier
from pulsesync.run import bodies, keys, reader
from pulsesync.run.fleet import read_fleet
from pulsesync.run.reader import RunReader
from pulsesync.store import LocalStore, MemoryStore
from tests.publishers import Publisher
from tests.readers import Subscriber, move_pointer
from tests.runs import Training, Watched, equal, parts_of, publish_steps, version, worker

KEY, OTHER = SigningKey("11" * 32), SigningKey("22" * 32)


@pytest.fixture
def look_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "LOOK_AGAIN_S", 0.0)


def run_of(steps: int, **options: Any) -> tuple[Watched, list[dict[str, Any]]]:
    store = Watched()
    return store, publish_steps(store, steps, **options)


def write(store: Watched, move: Pointer, key: SigningKey | None = None) -> None:
    """Put a record of a pointer, whatever it says."""
    data = move.build()
    store.store.put(keys.pointer_key("stable", move.number), signature.sign(data, key) if key else data)


def forged(store: Watched, **changes: Any) -> Pointer:
    """A move to version 1, but for what is given."""
    true = version(store, 1)
    facts: dict[str, Any] = {"run": true.run, "name": "stable", "number": 0, "version": 1, "digest": true.digest}
    return Pointer(**{**facts, "created": 0, **changes})


# -- following -----------------------------------------------------------------------------------------------------


def test_a_sync_goes_where_the_pointer_points_and_not_further() -> None:
    store, states = run_of(5)
    move_pointer(store, "stable", 2)
    sub, held = Subscriber(store, follow="stable"), worker()
    report = sub.sync(held)
    assert (report.version, report.pointer) == (2, "stable")
    assert equal(held, states[2])
    assert sub.sync(held).path == ()


def test_a_pointer_that_moves_on_takes_the_worker_with_it() -> None:
    store, states = run_of(5)
    move_pointer(store, "stable", 2)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    move_pointer(store, "stable", 4)
    assert sub.sync(held).path == ("patch", "patch")
    assert equal(held, states[4])


def test_a_pointer_that_is_moved_back_takes_the_worker_back_without_a_body() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store, follow="stable"), worker()
    for number in (2, 4):
        move_pointer(store, "stable", number)
        sub.sync(held)
    move_pointer(store, "stable", 2)
    store.gets.clear()
    report = sub.sync(held)
    assert (report.version, report.path, store.got("parts/")) == (2, ("undo",), [])
    assert equal(held, states[2])


def test_a_pointer_that_is_moved_back_further_than_was_kept_is_reached_from_an_anchor() -> None:
    store, states = run_of(5)
    sub, held = Subscriber(store, follow="stable", undo=0), worker()
    move_pointer(store, "stable", 4)
    sub.sync(held)
    move_pointer(store, "stable", 1)
    assert sub.sync(held).path == ("anchor", "patch")
    assert equal(held, states[1])


def test_a_version_that_is_asked_for_comes_before_the_pointer() -> None:
    store, states = run_of(4)
    move_pointer(store, "stable", 2)
    sub, held = Subscriber(store, follow="stable"), worker()
    report = sub.sync(held, version=3)
    assert (report.version, report.pointer) == (3, None)
    assert equal(held, states[3])


def test_workers_follow_different_pointers_of_one_run() -> None:
    store, states = run_of(4)
    move_pointer(store, "stable", 1)
    move_pointer(store, "canary", 3)
    for name, number in (("stable", 1), ("canary", 3)):
        held = worker()
        Subscriber(store, follow=name).sync(held)
        assert equal(held, states[number])


def test_watch_yields_a_report_for_each_move_in_either_direction() -> None:
    store, _ = run_of(4)
    move_pointer(store, "stable", 1)
    seen = []
    with Subscriber(store, follow="stable") as sub:
        for report in sub.watch(worker(), interval_s=0.001):
            seen.append(report.version)
            if len(seen) == 3:
                break
            move_pointer(store, "stable", {1: 3, 3: 2}[report.version])
    assert seen == [1, 3, 2]


def test_a_look_that_finds_nothing_new_costs_three_small_reads() -> None:
    store, _ = run_of(3)
    move_pointer(store, "stable", 1)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    store.gets.clear()
    sub.sync(held)
    assert [key for key, _, _ in store.gets] == [
        keys.manifest_key(1),
        keys.pointer_hint("stable"),
        keys.pointer_key("stable", 1),
    ]


def test_a_name_that_is_none_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="the name of a pointer must be"):
        Subscriber(MemoryStore(), follow="../stable")


# -- pointers that lead nowhere ------------------------------------------------------------------------------------


def test_a_pointer_that_does_not_exist_yet_is_named_with_the_command_that_creates_it() -> None:
    store, _ = run_of(2)
    with pytest.raises(NothingPublishedError, match="has no pointer 'stable' yet; create it with: pulse point"):
        Subscriber(store, follow="stable").sync(worker())


def test_a_sync_waits_for_a_pointer_if_it_is_asked_to() -> None:
    store, _ = run_of(2)
    timer = threading.Timer(0.3, move_pointer, (store, "stable", 1))
    timer.start()
    assert Subscriber(store, follow="stable").sync(worker(), wait_s=30).version == 1
    timer.join()


def test_a_location_without_a_run_has_no_pointer() -> None:
    with pytest.raises(NothingPublishedError):
        Subscriber(MemoryStore(), follow="stable").sync(worker())


def test_a_pointer_to_a_version_that_is_gone_is_a_missing_link() -> None:
    store, _ = run_of(3)
    move_pointer(store, "stable", 1)
    store.delete(keys.manifest_key(1))
    with pytest.raises(MissingLinkError, match="pointer 'stable' names version 1, which is no longer published"):
        Subscriber(store, follow="stable").sync(worker())


def test_a_pointer_of_another_run_is_a_replaced_run(look_again_at_once: None) -> None:
    store, _ = run_of(3)
    write(store, forged(store, run="ab" * 16))
    for follow_replaced in (False, True):
        with pytest.raises(RunReplacedError, match="names version 1 of run abab"):
            Subscriber(store, follow="stable").sync(worker(), follow_replaced=follow_replaced)


def test_a_worker_follows_the_pointer_of_the_run_that_replaced_its_own(look_again_at_once: None) -> None:
    store, _ = run_of(4)
    for number in (1, 2, 3):
        move_pointer(store, "stable", number)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    store.store = MemoryStore()
    states = publish_steps(store, 3, Training(seed=1))
    move_pointer(store, "stable", 1)
    with pytest.raises(RunReplacedError):
        sub.sync(held)
    assert sub.sync(held, follow_replaced=True).version == 1
    assert equal(held, states[1])


def test_a_pointer_to_another_state_of_its_version_is_refused() -> None:
    store, states = run_of(3)
    move_pointer(store, "stable", 2)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    write(store, forged(store, number=1, digest="ab" * 32))
    with pytest.raises(ChainError, match="with the digest abababababab"):
        sub.sync(held)
    assert equal(held, states[2])


# -- hostile records -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", FormatError),
        (b"rubbish\n", FormatError),
        (b"\xff" * 300, FormatError),
        (b"[" * 4000 + b"\n", FormatError),
        (bytes(MAX_BYTES + 1), LimitError),
        (bytes(50_000_000), LimitError),
    ],
    ids=["empty", "rubbish", "no text", "deep", "too long", "much too long"],
)
def test_bytes_that_are_no_pointer_are_refused_and_leave_the_weights(data: bytes, error: type[PulseError]) -> None:
    store, states = run_of(3)
    move_pointer(store, "stable", 2)
    sub, held = Subscriber(store, follow="stable"), worker()
    sub.sync(held)
    store.store.put(keys.pointer_key("stable", 1), data)
    with pytest.raises(error) as caught:
        sub.sync(held)
    assert getattr(caught.value, "key", None) == keys.pointer_key("stable", 1)
    assert all(end is not None and end <= MAX_BYTES + 1 for key, _, end in store.gets if "pointers/" in key)
    assert equal(held, states[2])


@pytest.mark.parametrize("changes", [{"name": "canary"}, {"number": 1}], ids=str)
def test_a_move_under_the_key_of_another_is_refused(changes: dict[str, Any]) -> None:
    store, _ = run_of(3)
    store.put(keys.pointer_key("stable", 0), forged(store, **changes).build())
    with pytest.raises(ChainError, match="pointers/stable/0000000000000000 in memory://: the record is move"):
        Subscriber(store, follow="stable").sync(worker())


@pytest.mark.parametrize("signer", [None, OTHER], ids=["nobody", "another key"])
def test_a_worker_that_trusts_a_key_refuses_moves_that_it_did_not_sign(signer: SigningKey | None) -> None:
    store, states = run_of(3, signing_key=KEY)
    move_pointer(store, "stable", 2, signing_key=KEY)
    sub, held = Subscriber(store, follow="stable", trust=KEY.public), worker()
    sub.sync(held)
    write(store, forged(store, number=1), signer)
    with pytest.raises(SignatureError):
        sub.sync(held)
    assert equal(held, states[2])


def test_a_run_that_is_not_signed_is_named_as_such_and_no_check_is_to_be_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = run_of(1)
    with pytest.raises(SignatureError) as caught:
        Subscriber(store, trust=KEY.public).sync(worker())
    said = f"{caught.value} {caplog.text}"
    assert "the record is not signed, but trust= accepts only what one of its keys signed" in said
    assert "have it publish with signing_key= to a new location" in said
    for wrong in ("bytes are bad", "drop trust=", "backup"):
        assert wrong not in said


# -- keys that may move pointers and nothing else ------------------------------------------------------------------


def test_a_key_in_trust_pointers_may_move_pointers_as_a_key_in_trust_may() -> None:
    store, states = run_of(4, signing_key=KEY)
    sub, held = (
        Subscriber(store, follow="stable", trust=KEY.public, trust_pointers=OTHER.public, max_staleness=0),
        worker(),
    )
    for number, signer in ((1, OTHER), (3, KEY), (2, OTHER)):
        move_pointer(store, "stable", number, signing_key=signer, trust=KEY.public, trust_pointers=OTHER.public)
        assert sub.sync(held).version == number
        assert sub.check_fresh() == 0
        assert equal(held, states[number])
    with pytest.raises(SignatureError, match=r"may not move pointers.*add it to trust_pointers="):
        Subscriber(store, follow="stable", trust=KEY.public).sync(worker())


def test_a_key_in_trust_pointers_can_neither_publish_nor_squash_nor_delegate() -> None:
    """The same records are accepted where the key is in trust=, so it is the right that is missing, not a byte."""
    store, _ = run_of(3, signing_key=KEY)
    records = RunReader(store, {KEY.public})
    anchor = records.look(keys.anchor_key(0))
    assert anchor is not None
    thief = SigningKey("33" * 32)
    delegate = SigningKey(thief.secret, OTHER.delegate(anchor.run, thief.public))
    for signer in (OTHER, delegate):
        for record, key in ((version(store, 2), keys.manifest_key(2)), (anchor, keys.anchor_key(0))):
            good = store.store.get(key)
            store.store.put(key, signature.sign(record.build(), signer))
            with pytest.raises(SignatureError):
                Subscriber(store, trust=KEY.public, trust_pointers=OTHER.public).sync(worker(), 2)
            if signer is OTHER:
                assert Subscriber(store, trust=[KEY.public, OTHER.public]).sync(worker(), 2).version == 2
            store.store.put(key, good)
    facts: dict[str, Any] = {"kind": RecordKind.SQUASH, "version": 32, "index": 32, "history": None}
    squash = replace(version(store, 2), **facts, base=BaseRef(0, "cd" * 32))
    for signer in (OTHER, delegate):
        store.store.put(keys.squash_key(0, 0), signature.sign(squash.build(), signer))
        with pytest.raises(SignatureError):
            RunReader(store, {KEY.public}, trust_pointers={OTHER.public}).look(keys.squash_key(0, 0))
        assert RunReader(store, {OTHER.public}).look(keys.squash_key(0, 0)) == squash


def test_moves_of_another_key_or_a_delegate_are_refused_as_before() -> None:
    store, _ = run_of(3, signing_key=KEY)
    stranger = SigningKey("33" * 32)
    delegate = SigningKey(stranger.secret, OTHER.delegate(version(store, 1).run, stranger.public))
    for signer in (stranger, delegate, None):
        write(store, forged(store), signer)
        with pytest.raises(SignatureError):
            read_pointers(store, trust=KEY.public, trust_pointers=OTHER.public)


def test_keys_that_may_only_move_pointers_need_one_that_may_publish_and_are_not_among_those() -> None:
    store, _ = run_of(2, signing_key=KEY)
    with pytest.raises(ValueError, match="trust_pointers= needs trust= as well"):
        Subscriber(store, trust_pointers=OTHER.public)
    with pytest.raises(ValueError, match=f"{OTHER.public} is in both trust= and trust_pointers=.*name it in one"):
        read_pointers(store, trust=[KEY.public, OTHER.public], trust_pointers=OTHER.public.upper())
    with pytest.raises(ValueError, match="trust_pointers must be one or more public keys"):
        Subscriber(store, trust=KEY.public, trust_pointers=[])


def test_an_operator_moves_pointers_with_a_key_of_their_own() -> None:
    """The operator passes the run's key as trust=; their own key need not be listed for the moves that it made."""
    store, _ = run_of(4, signing_key=KEY)
    for number in (1, 3, 2):
        moved = move_pointer(store, "stable", number, signing_key=OTHER, trust=KEY.public)
        assert moved.version == number
    with pytest.raises(SignatureError, match="not trusted"):  # without the run's key no version is accepted
        move_pointer(store, "stable", 1, signing_key=OTHER)
    with pytest.raises(SignatureError, match="may not move pointers"):  # the publisher must know the operator's key
        move_pointer(store, "stable", 1, signing_key=KEY)
    move_pointer(store, "stable", 1, signing_key=KEY, trust=KEY.public, trust_pointers=OTHER.public)


def test_a_prune_keeps_what_a_pointers_key_has_named() -> None:
    store, _ = run_of(70, anchor_every=0.0, signing_key=KEY)
    move_pointer(store, "stable", 40, signing_key=OTHER, trust=KEY.public)
    limits: dict[str, Any] = {"keep_versions": 3, "keep_hours": 0, "grace_hours": 0, "trust": KEY.public}
    with pytest.raises(SignatureError):
        prune(store, **limits)
    report = prune(store, **limits, trust_pointers=OTHER.public)
    assert (report.pinned_by, report.kept_from) == ("stable", 32)


def test_a_fleet_is_read_with_the_key_of_its_pointers() -> None:
    store, _ = run_of(2, signing_key=KEY)
    move_pointer(store, "stable", 1, signing_key=OTHER, trust=KEY.public)
    assert read_fleet(store, trust=KEY.public, trust_pointers=OTHER.public).pointers == {"stable": 1}
    with pytest.raises(SignatureError):
        read_fleet(store, trust=KEY.public)
    assert [one.fault for one in RunVerifier(store, trust=KEY.public).run() if one.fault]
    good = RunVerifier(store, trust=KEY.public, trust_pointers=OTHER.public).run()
    assert [one.fault for one in good if one.fault] == []


def test_a_store_that_withholds_the_last_moves_does_not_take_a_worker_back() -> None:
    store, _ = run_of(4)
    for number in (1, 3):
        move_pointer(store, "stable", number)
    sub, held = Subscriber(store, follow="stable"), worker()
    assert sub.sync(held).version == 3
    store.delete(keys.pointer_key("stable", 1))
    store.put(keys.pointer_hint("stable"), b"0")
    assert sub.sync(held).version == 3


# -- hints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hint", [None, b"", b"0", b"2", b"7", b"-1", b"../2", b"9" * 32, b"9" * 100_000])
def test_a_hint_is_where_to_begin_and_not_what_to_believe(hint: bytes | None) -> None:
    store, _ = run_of(4)
    for number in (1, 2, 3):
        move_pointer(store, "stable", number)
    store.delete(keys.pointer_hint("stable"))
    if hint is not None:
        store.put(keys.pointer_hint("stable"), hint)
    assert Subscriber(store, follow="stable").sync(worker()).version == 3


def test_the_last_move_is_found_by_a_listing_if_the_first_are_gone_and_the_hint_lags() -> None:
    store, _ = run_of(4)
    for number in (0, 1, 2, 3):
        move_pointer(store, "stable", number)
    for number in (0, 1):
        store.delete(keys.pointer_key("stable", number))
    store.put(keys.pointer_hint("stable"), b"0")
    pointer = RunReader(store, None).pointer("stable")
    assert pointer is not None
    assert (pointer.number, pointer.version) == (3, 3)


# -- reading all ---------------------------------------------------------------------------------------------------


def test_pointers_are_read_by_name() -> None:
    store, _ = run_of(4, signing_key=KEY)
    assert read_pointers(store) == {}
    move_pointer(store, "stable", 1, signing_key=KEY)
    move_pointer(store, "canary", 2, signing_key=KEY)
    move_pointer(store, "canary", 3, signing_key=KEY)
    found = read_pointers(store, trust=KEY.public)
    assert {name: (one.version, one.number, one.signed_by) for name, one in found.items()} == {
        "canary": (3, 1, KEY.public),
        "stable": (1, 0, KEY.public),
    }
    with pytest.raises(SignatureError):
        read_pointers(store, trust=OTHER.public)


def test_what_is_no_name_is_not_among_the_pointers() -> None:
    store, _ = run_of(2)
    move_pointer(store, "stable", 1)
    for key in ("pointers/Stable/0000000000000000", "pointers/x", "pointers/a/b/c"):
        store.put(key, b"rubbish")
    assert list(read_pointers(store)) == ["stable"]


def test_the_names_are_in_the_package() -> None:
    assert isinstance(move_pointer(run_of(2)[0], "stable", 0), pulsesync.Pointer)


# -- after a prune -------------------------------------------------------------------------------------------------


def test_a_fleet_on_a_pointer_can_join_after_a_prune() -> None:
    store, states = run_of(12, anchor_every=0, epoch_patches=2)
    move_pointer(store, "stable", 5, epoch_patches=2)
    for _ in range(2):
        prune(store, keep_versions=1, keep_hours=0.0, grace_hours=0.0)
    held = worker()
    assert Subscriber(store, follow="stable", epoch_patches=2).sync(held).path == ("anchor", "patch")
    assert equal(held, states[5])
    assert Subscriber(store, epoch_patches=2).sync(worker()).version == 11


# -- staleness -----------------------------------------------------------------------------------------------------


def test_weights_are_fresh_up_to_the_limit_and_stale_beyond_it() -> None:
    store, training = Watched(), Training()
    pub, sub, held = Publisher(store), Subscriber(store, max_staleness=2), worker()
    pub.publish(training.weights)
    pub.flush()
    sub.sync(held)
    for away in (0, 1, 2):
        assert sub.check_fresh() == away
        training.step()
        pub.publish(training.weights)
    with pytest.raises(StaleWeightsError, match="the local version is 0, 3 versions away") as caught:
        sub.check_fresh()
    assert (caught.value.version, caught.value.newest, caught.value.max_staleness) == (0, 3, 2)
    sub.sync(held)
    assert sub.check_fresh() == 0
    pub.close()


def test_with_a_pointer_staleness_is_measured_from_the_version_that_it_names() -> None:
    store, _ = run_of(6)
    move_pointer(store, "stable", 1)
    sub = Subscriber(store, follow="stable", max_staleness=1)
    sub.sync(worker())
    assert sub.check_fresh() == 0
    move_pointer(store, "stable", 2)
    assert sub.check_fresh() == 1
    move_pointer(store, "stable", 5)
    with pytest.raises(StaleWeightsError):
        sub.check_fresh()


def test_a_worker_is_stale_if_its_pointer_was_moved_far_back() -> None:
    store, _ = run_of(6)
    move_pointer(store, "stable", 5)
    sub = Subscriber(store, follow="stable", max_staleness=2)
    sub.sync(worker())
    move_pointer(store, "stable", 1)
    with pytest.raises(StaleWeightsError) as caught:
        sub.check_fresh()
    assert (caught.value.version, caught.value.newest) == (5, 1)


def test_a_worker_that_has_synced_nothing_is_stale() -> None:
    store, _ = run_of(2)
    with pytest.raises(StaleWeightsError, match="nothing was synced yet") as caught:
        Subscriber(store, max_staleness=100).check_fresh()
    assert (caught.value.version, caught.value.newest) == (None, 1)


def test_weights_of_unknown_age_are_not_fresh() -> None:
    store, _ = run_of(2)
    sub = Subscriber(store, max_staleness=100)
    sub.sync(worker())
    store.fail_at("head", "manifests/")
    with pytest.raises(StoreError, match="the line is down"):
        sub.check_fresh()
    store.fail_at()
    assert sub.check_fresh() == 0


def test_weights_of_a_run_that_was_replaced_are_not_fresh(look_again_at_once: None) -> None:
    store, _ = run_of(6)
    sub = Subscriber(store, max_staleness=100)
    sub.sync(worker())
    store.store = MemoryStore()
    publish_steps(store, 2, Training(seed=1))
    with pytest.raises(RunReplacedError):
        sub.check_fresh()


def test_a_check_costs_three_small_reads() -> None:
    store, _ = run_of(3)
    sub = Subscriber(store, max_staleness=1)
    sub.sync(worker())
    store.gets.clear()
    sub.check_fresh()
    assert [key for key, _, _ in store.gets] == [keys.manifest_key(2), keys.HEAD, keys.manifest_key(3)]


def test_a_watch_that_cannot_catch_up_logs_that_the_weights_are_stale(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "INLINE_BYTES", 0)
    store, _ = run_of(6)
    sub, held = Subscriber(store, max_staleness=2), worker()
    sub.sync(held, version=1)

    def fail(verb: str, key: str) -> None:
        if key == parts_of(store.store, keys.manifest_key(5))[0]:
            store.before = lambda verb, key: None
            raise StoreError("no answer", key=key, retryable=True)

    store.before = fail
    with caplog.at_level(logging.ERROR):
        assert next(sub.watch(held, interval_s=0.001)).version == 5
    (said,) = caplog.messages
    assert "cannot be updated at the moment" in said
    assert "the local version is 1, 4 versions away" in said


def test_a_check_without_a_limit_is_a_mistake_in_the_program() -> None:
    with pytest.raises(ValueError, match="pass max_staleness= to the Subscriber"):
        Subscriber(MemoryStore()).check_fresh()


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_staleness must be None or a number of versions, 0 or more; got -1"):
        Subscriber(MemoryStore(), max_staleness=-1)


def test_a_pointer_in_a_folder_is_a_file(tmp_path: Any) -> None:
    publish_steps(str(tmp_path), 2)
    move_pointer(str(tmp_path), "stable", 1)
    assert (tmp_path / "pointers/stable/0000000000000000").read_bytes() == LocalStore(tmp_path).get(
        keys.pointer_key("stable", 0)
    )
    assert (tmp_path / "pointers/stable/head").read_bytes() == b"0"
