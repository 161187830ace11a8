"""Moving pointers: what is checked first, and who wins if two do it at once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pulsesync import Pointer, PointerMovedError, SigningKey, Subscriber, move_pointer, read_pointers
from pulsesync.errors import ConflictError, MissingLinkError, NothingPublishedError, SignatureError, StoreError
from pulsesync.maintain.verify import find_records
from pulsesync.run import keys
from pulsesync.run.reader import RunReader
from pulsesync.store import LocalStore, MemoryStore, ObjectEntry
from tests.runs import Training, Watched, publish_steps, version, worker

KEY, OTHER = SigningKey("11" * 32), SigningKey("22" * 32)


def run_of(steps: int) -> Watched:
    store = Watched()
    publish_steps(store, steps)
    store.writes.clear()
    return store


def test_each_move_is_a_record_of_its_own_and_the_hint_follows() -> None:
    store = run_of(4)
    moves = [move_pointer(store, "stable", number) for number in (3, 1)]
    assert [(move.number, move.version, move.digest) for move in moves] == [
        (0, 3, version(store, 3).digest),
        (1, 1, version(store, 1).digest),
    ]
    assert store.writes == [
        keys.pointer_key("stable", 0),
        keys.pointer_hint("stable"),
        keys.pointer_key("stable", 1),
        keys.pointer_hint("stable"),
    ]
    assert read_pointers(store) == {"stable": moves[-1]}


def test_a_pointer_that_is_there_already_is_left_alone() -> None:
    store = run_of(2)
    first = move_pointer(store, "stable", 1)
    store.writes.clear()
    assert move_pointer(store, "stable", 1) == first
    assert store.writes == []


@pytest.mark.parametrize("winner", [2, 3])
def test_the_loser_of_two_moves_is_told_who_won_and_overwrites_nothing(winner: int) -> None:
    store = run_of(4)
    move_pointer(store, "stable", 0)

    def move_first(verb: str, key: str) -> None:
        if verb == "create":
            store.before = lambda verb, key: None
            move_pointer(store.store, "stable", winner)

    store.before = move_first
    with pytest.raises(
        PointerMovedError, match=f"another process moved stable to version {winner} meanwhile"
    ) as caught:
        move_pointer(store, "stable", 1)
    assert isinstance(caught.value, ConflictError)
    assert (caught.value.pointer, caught.value.version) == ("stable", winner)
    assert read_pointers(store)["stable"].version == winner


def test_of_many_that_move_a_pointer_at_once_each_makes_a_move_of_its_own_or_loses(tmp_path: Path) -> None:
    publish_steps(str(tmp_path), 8)
    start = threading.Barrier(8)

    def move(number: int) -> Pointer | PointerMovedError:
        start.wait()
        try:
            return move_pointer(str(tmp_path), "stable", number)
        except PointerMovedError as e:
            return e

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(move, range(8)))
    won = sorted((one for one in outcomes if isinstance(one, Pointer)), key=lambda one: one.number)
    store = RunReader(LocalStore(tmp_path), None)
    assert [store.move("stable", number) for number in range(len(won) + 1)] == [*won, None]
    assert read_pointers(str(tmp_path))["stable"] == won[-1]
    lost = [one for one in outcomes if isinstance(one, PointerMovedError)]
    assert {one.version for one in lost} <= {one.version for one in won}


class Echo(MemoryStore):
    """A store that creates an object and does not say so, and is asked once more, as `RetryStore` does."""

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        super().create(key, data)


def test_a_move_whose_answer_was_lost_and_that_was_sent_again_succeeds() -> None:
    source, store = run_of(3), Echo()
    for kind in ("manifests", "anchors", "layouts", "parts"):
        for entry in source.list(f"{kind}/"):
            store.put(entry.key, source.get(entry.key))
    assert move_pointer(store, "stable", 1) == read_pointers(store)["stable"]


def test_a_version_that_is_pruned_while_a_pointer_is_moved_to_it_is_reported() -> None:
    store = run_of(3)

    def prune(verb: str, key: str) -> None:
        if verb == "create":
            store.delete(keys.manifest_key(1))

    store.before = prune
    with pytest.raises(MissingLinkError, match="version 1 was pruned while stable was moved to it"):
        move_pointer(store, "stable", 1)


def test_a_move_is_made_although_the_hint_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    store = run_of(3)

    def refuse(verb: str, key: str) -> None:
        if verb == "put":
            raise StoreError("no", key=key)

    store.before = refuse
    move_pointer(store, "stable", 1)
    assert "the hint to its newest move was not written" in caplog.text
    assert Subscriber(store, follow="stable").sync(worker()).version == 1


def test_a_version_that_is_not_published_is_refused() -> None:
    store = run_of(3)
    with pytest.raises(MissingLinkError, match="version 9 is not published, or was pruned; pulse log lists"):
        move_pointer(store, "stable", 9)
    assert read_pointers(store) == {}


def test_a_version_that_no_worker_could_join_at_is_refused() -> None:
    store = run_of(40)
    for entry in list(store.list("anchors/")):
        store.delete(entry.key)
    with pytest.raises(MissingLinkError, match="no published path leads to version 39"):
        move_pointer(store, "stable", 39)
    with pytest.raises(NothingPublishedError, match="no anchor from which it can be reached"):
        move_pointer(store, "stable", 0)
    assert read_pointers(store) == {}


def test_a_location_without_a_run_has_nothing_to_point_to() -> None:
    with pytest.raises(NothingPublishedError, match="there is no run"):
        move_pointer(MemoryStore(), "stable", 0)


def test_a_name_that_could_lead_elsewhere_is_refused() -> None:
    store = run_of(2)
    with pytest.raises(ValueError, match=r"got '\.\./stable'"):
        move_pointer(store, "../stable", 1)
    assert store.writes == []


def test_a_pointer_of_a_run_that_was_replaced_is_moved_to_the_new_one() -> None:
    store, old = run_of(3), run_of(2)
    move_pointer(old, "stable", 1)
    store.put(keys.pointer_key("stable", 0), old.get(keys.pointer_key("stable", 0)))
    assert move_pointer(store, "stable", 1).number == 1
    assert Subscriber(store, follow="stable").sync(worker()).version == 1


def test_the_owner_of_the_key_moves_the_pointers_of_a_signed_run() -> None:
    store = Watched()
    publish_steps(store, 3, Training(), signing_key=KEY)
    store.writes.clear()
    with pytest.raises(SignatureError, match="this run is signed; pass signing_key="):
        move_pointer(store, "stable", 1)
    with pytest.raises(SignatureError, match="not trusted"):
        move_pointer(store, "stable", 1, signing_key=OTHER)
    assert store.writes == []
    move_pointer(store, "stable", 1, signing_key=KEY)
    assert Subscriber(store, follow="stable", trust=KEY.public).sync(worker()).version == 1


def test_an_operator_with_a_key_of_their_own_moves_pointers_for_workers_that_trust_both() -> None:
    store, both = Watched(), {KEY.public, OTHER.public}
    publish_steps(store, 3, Training(), signing_key=KEY)
    move_pointer(store, "stable", 1, signing_key=OTHER, trust=both)
    assert Subscriber(store, follow="stable", trust=both).sync(worker()).version == 1
    with pytest.raises(SignatureError):
        Subscriber(store, follow="stable", trust=KEY.public).sync(worker())


def test_verify_takes_a_listing_that_failed_for_no_store_that_cannot_list() -> None:
    """It would leave out the pointers, and call all that it has looked at good."""

    class Failing(MemoryStore):
        retryable = False

        def list(self, prefix: str) -> Iterator[ObjectEntry]:
            raise StoreError("on purpose", key=prefix, retryable=self.retryable)

    store = Failing()
    publish_steps(store, 2)
    assert len(find_records(RunReader(store, None))) >= 2
    store.retryable = True
    with pytest.raises(StoreError, match="on purpose"):
        find_records(RunReader(store, None))
