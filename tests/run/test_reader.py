"""Reading a run: records, the newest version and hints, with the calls that each of them costs."""

from dataclasses import replace

import pytest

from pulsesync import Publisher
from pulsesync.core.types import TensorSpec
from pulsesync.errors import ChainError, ChecksumError, FormatError, LimitError, SignatureError, StoreError
from pulsesync.format import layout as layouts
from pulsesync.format import signature
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import BaseRef, Manifest, PartRef, RecordKind
from pulsesync.format.pointer import Pointer
from pulsesync.format.signature import SigningKey
from pulsesync.run import keys
from pulsesync.run.reader import RunReader, describe
from pulsesync.store import MemoryStore
from tests.helpers import RUN
from tests.runs import Training, Watched, publish_steps, version


def made(number: int, **changes: object) -> Manifest:
    base = BaseRef(number - 1, f"{number - 1:064x}") if number else None
    parts = (PartRef(f"{number:064x}", 100),) if number else ()
    manifest = Manifest(RUN, number, 7, 0, number, base, "0" * 64, parts, f"{number:064x}", None, 0)
    return replace(manifest, **changes)  # type: ignore[arg-type]


def store_with(count: int, head: bytes | None = None) -> Watched:
    store = Watched()
    for number in range(count):
        store.store.create(keys.manifest_key(number), made(number).build())
    if head is not None:
        store.store.put(keys.HEAD, head)
    return store


# -- records -------------------------------------------------------------------------------------------------------


def test_a_record_is_fetched_once() -> None:
    store = store_with(3)
    known = RunReader(store, None)
    assert known.version(2) is known.version(2)
    assert known.version(7) is known.version(7) is None
    assert len(store.gets) == 2
    assert known.fetched_bytes == len(made(2).build())


def test_a_record_that_is_avoided_is_not_there() -> None:
    store = store_with(3)
    assert RunReader(store, None, {keys.manifest_key(2)}).look(keys.manifest_key(2)) is None
    assert store.gets == []


def test_where_a_record_was_found_is_known() -> None:
    known = RunReader(store_with(3), None)
    found = known.version(1)
    assert found is not None
    assert known.key_of(found) == keys.manifest_key(1)


@pytest.mark.parametrize("key", [keys.anchor_key(0), keys.squash_key(0, 0)])
def test_a_record_of_another_kind_than_its_place_is_refused(key: str) -> None:
    store = store_with(2)
    store.store.put(key, made(1).build())
    with pytest.raises(FormatError, match="kind") as caught:
        RunReader(store, None).look(key)
    assert caught.value.key == key


def test_a_version_in_the_place_of_another_is_refused() -> None:
    store = store_with(3)
    store.store.put(keys.manifest_key(2), made(1).build())
    with pytest.raises(ChainError, match="version 1") as caught:
        RunReader(store, None).version(2)
    assert caught.value.key == keys.manifest_key(2)


@pytest.mark.parametrize("data", [b"", b"{}\n", b"null\n", made(1).build()[:-5], made(1).build() + b"x"], ids=repr)
def test_what_is_no_record_is_refused_with_its_key(data: bytes) -> None:
    store = store_with(0)
    store.store.put(keys.manifest_key(1), data)
    with pytest.raises(FormatError) as caught:
        RunReader(store, None).version(1)
    assert caught.value.key == keys.manifest_key(1)


def test_no_more_of_a_record_is_read_than_one_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pulsesync.format.manifest.MAX_BYTES", 1000)
    store = store_with(0)
    store.store.put(keys.manifest_key(0), b"x" * 100_000)
    with pytest.raises(LimitError):
        RunReader(store, None).version(0)
    assert store.gets == [(keys.manifest_key(0), 0, 1001)] * 2  # what is bad is read again


def test_a_record_by_a_trusted_key_is_taken_and_any_other_is_refused() -> None:
    mine, other = SigningKey.generate(), SigningKey.generate()
    store = store_with(1)
    for number, key in ((1, mine), (2, other)):
        store.store.put(keys.manifest_key(number), signature.sign(made(number).build(), key))
    known = RunReader(store, {mine.public})
    assert known.version(1) == made(1)
    for number in (0, 2):
        with pytest.raises(SignatureError):
            known.version(number)


def test_an_error_about_a_signature_names_the_record_and_the_key_that_signed_it() -> None:
    mine, other = SigningKey.generate(), SigningKey.generate()
    store = store_with(0)
    store.store.put(keys.manifest_key(0), signature.sign(made(0).build(), other))
    with pytest.raises(SignatureError) as caught:
        RunReader(store, {mine.public}).version(0)
    assert (caught.value.key, caught.value.public_key) == (keys.manifest_key(0), other.public)


# -- the newest version --------------------------------------------------------------------------------------------


def newest(store: Watched, after: int = -1) -> int | None:
    found = RunReader(store, None).newest(after)
    return found.version if found else None


def test_the_newest_version_is_where_head_says() -> None:
    store = store_with(9, b"8")
    assert newest(store) == 8
    assert [key for key, _, _ in store.gets] == ["head", keys.manifest_key(8), keys.manifest_key(9)]


@pytest.mark.parametrize("head", [b"3", b"0", b"", b"-1", b"x", b"99999999999999999999", b"1e3", b" 4 ", None])
def test_a_head_that_lags_or_lies_is_where_to_begin_and_not_what_to_believe(head: bytes | None) -> None:
    assert newest(store_with(9, head)) == 8


@pytest.mark.parametrize("after", [-1, 3, 8])
def test_a_head_that_runs_ahead_is_not_believed(after: int) -> None:
    assert newest(store_with(9, b"5000"), after) == (8 if after < 8 else None)


def test_from_a_version_that_is_held_the_next_is_probed_though_head_lags() -> None:
    store = store_with(9, b"3")
    assert newest(store, after=6) == 8


def test_what_is_held_already_is_nothing_new() -> None:
    store = store_with(9, b"8")
    assert newest(store, after=8) is None
    assert len(store.gets) <= 2


def listings(store: Watched) -> list[str]:
    """Return a list to which each listing of the store adds its prefix from now on."""
    found: list[str] = []
    store.before = lambda verb, key: found.append(key) if verb == "list" else None
    return found


@pytest.mark.parametrize(("head", "lists"), [(b"8", 0), (b"7", 0), (b"0", 0), (None, 1), (b"x", 1), (b"12", 1)])
def test_a_look_that_finds_nothing_new_lists_only_if_the_hint_leads_nowhere(head: bytes | None, lists: int) -> None:
    """A trainer that is killed between a manifest and the head leaves one that lags: no poll may list the run then."""
    store = store_with(9, head)
    asked = listings(store)
    assert newest(store, after=8) is None
    assert asked == ["manifests/"] * lists
    assert len(store.gets) <= 4


def test_a_local_version_that_cannot_be_read_is_no_reason_to_list() -> None:
    store = store_with(9, b"7")
    store.store.put(keys.manifest_key(8), b"damaged")
    asked = listings(store)
    assert newest(store, after=8) is None
    assert asked == []


@pytest.mark.parametrize("head", [b"8", b"7"])
def test_a_local_version_that_is_gone_is_a_reason_to_list(head: bytes) -> None:
    """The run was rolled back, or replaced by a shorter or longer one."""
    store = store_with(8, head)
    asked = listings(store)
    records = RunReader(store, None)
    assert records.version(8) is None
    assert records.newest(after=8) is None
    assert asked == ["manifests/"]


@pytest.mark.parametrize("hint", [b"3", b"2"])
def test_a_pointer_whose_hint_lags_is_not_listed(hint: bytes) -> None:
    store = store_with(2)
    for number in range(4):
        move = Pointer(RUN, "stable", number, 1, made(1).digest, 0)
        store.store.put(keys.pointer_key("stable", number), move.build())
    store.store.put(keys.pointer_hint("stable"), hint)
    asked = listings(store)
    assert RunReader(store, None).pointer("stable", after=3) is None
    assert asked == []


def test_where_nothing_is_there_is_nothing_new() -> None:
    assert newest(Watched()) is None


def test_without_head_and_first_versions_a_listing_helps() -> None:
    store = store_with(9)
    for number in range(5):
        store.delete(keys.manifest_key(number))
    assert newest(store) == 8


def test_a_store_that_cannot_list_gives_what_it_can() -> None:
    store = store_with(0)

    def refuse(verb: str, key: str) -> None:
        if verb == "list":
            raise StoreError("no listing here")

    store.before = refuse
    assert newest(store) is None


def test_a_reader_whose_next_versions_were_pruned_finds_the_head() -> None:
    store = store_with(9, b"8")
    for number in range(6):
        store.delete(keys.manifest_key(number))
    assert newest(store, after=2) == 8


# -- starts --------------------------------------------------------------------------------------------------------


def start(hint: bytes | None, of: int) -> int | None:
    store = store_with(5)
    if hint is not None:
        store.store.put(keys.start_key(made(of).digest), hint)
    found = RunReader(store, None).start(made(of).digest)
    return found.version if found else None


def test_a_start_leads_to_its_version() -> None:
    assert start(b"3", of=3) == 3


@pytest.mark.parametrize("hint", [None, b"2", b"4", b"77", b"", b"three", b"-3"], ids=repr)
def test_a_start_that_lies_leads_nowhere(hint: bytes | None) -> None:
    assert start(hint, of=3) is None


def test_a_start_at_a_version_with_a_history_leads_nowhere() -> None:
    store = store_with(5)
    remembering = made(3, history="5" * 64)
    store.store.put(keys.manifest_key(3), remembering.build())
    store.store.put(keys.start_key(remembering.digest), b"3")
    assert RunReader(store, None).start(remembering.digest) is None


def test_at_the_end_of_an_epoch_its_history_is_over_and_a_start_leads_on() -> None:
    store = store_with(0)
    last = made(EPOCH_PATCHES, history="5" * 64)
    store.store.put(keys.manifest_key(last.version), last.build())
    store.store.put(keys.start_key(last.digest), str(last.version).encode())
    assert RunReader(store, None).start(last.digest) == last


# -- layouts --------------------------------------------------------------------------------------------------------


def test_a_layout_that_its_id_does_not_name_is_refused_with_its_key() -> None:
    store = Watched()
    good, other = (layouts.make([TensorSpec(name, "F32", (3,))]) for name in "ab")
    store.store.put(keys.layout_key(good.id), other.data)
    with pytest.raises(ChecksumError) as caught:
        RunReader(store, None).layout(good.id)
    assert caught.value.key == keys.layout_key(good.id)


# -- for people ----------------------------------------------------------------------------------------------------


def test_a_record_is_described_as_what_it_is() -> None:
    store = MemoryStore()
    publish_steps(store, 2)
    root, second = describe(version(store, 0)), describe(version(store, 1))
    assert (root["kind"], root["base"], root["bytes"]) == ("root", None, 0)
    assert (second["kind"], second["base"], second["step"]) == ("version", 0, 1)
    anchor = RunReader(store, None).look(keys.anchor_key(0))
    assert anchor is not None
    assert (describe(anchor)["kind"], anchor.kind) == ("anchor", RecordKind.ANCHOR)


def test_a_publisher_leaves_a_head_that_is_right() -> None:
    store = Watched()
    with Publisher(store) as pub:
        pub.publish(Training().weights)
        pub.publish(Training(seed=1).weights)
    store.gets.clear()
    assert newest(store) == 1
    assert len(store.gets) == 3
