"""The rules of a run over records in a dictionary: no store, no weights."""

from dataclasses import replace
from functools import cache

import pytest

from pulsesync.errors import ChainError, MissingLinkError, RunForkedError, RunReplacedError, RunRolledBackError
from pulsesync.format.epochs import EPOCH_PATCHES
from pulsesync.format.manifest import RECORD_BYTES, BaseRef, Manifest, PartRef, RecordKind
from pulsesync.run import keys, planner
from pulsesync.run.planner import Position, find_path

RUN, OTHER_RUN = "a" * 32, "b" * 32


def digest(version: int) -> str:
    return f"{version:064x}"


class Run:
    """The records of a run in which every patch has `patch_bytes` bytes and the versions in `roots` are roots."""

    def __init__(self, versions: int, patch_bytes: int = 10, roots: tuple[int, ...] = (0,)) -> None:
        self.records: dict[str, Manifest] = {}
        self.looks: list[str] = []
        last: Manifest | None = None
        for number in range(versions):
            if number in roots:
                epoch, index, base = last.epoch + 1 if last else 0, 0, None
            else:
                assert last is not None
                (epoch, index), base = last.next_patch, BaseRef(last.version, last.digest)
            parts = (PartRef(f"{number:064x}", patch_bytes),) if base else ()
            last = Manifest(RUN, number, number, epoch, index, base, "0" * 64, parts, digest(number), None, 0)
            self.records[keys.manifest_key(number)] = last
        self.starts = {r.starts: r for r in self.records.values() if Position.of(r).at_start}

    def version(self, number: int) -> Manifest:
        return self.records[keys.manifest_key(number)]

    def anchor(self, epoch: int, size: int = 1000, before: int | None = None) -> Manifest:
        start = self.starts[epoch]
        made = replace(start, kind=RecordKind.ANCHOR, base=None, parts=(PartRef("f" * 64, size),), anchor=before)
        self.records[keys.anchor_key(epoch)] = made
        return made

    def squash(self, level: int, number: int, size: int = 50) -> Manifest:
        first, last = self.starts[number << level], self.starts[(number + 1) << level]
        base = BaseRef(first.version, first.digest)
        made = replace(last, kind=RecordKind.SQUASH, base=base, parts=(PartRef("e" * 64, size),))
        self.records[keys.squash_key(level, number)] = made
        return made

    def look(self, key: str) -> Manifest | None:
        self.looks.append(key)
        return self.records.get(key)

    def way(self, held: int | None, goal: int) -> list[tuple[RecordKind, int]]:
        self.looks.clear()
        start = None if held is None else Position.of(self.version(held))
        return [(r.kind, r.version) for r in find_path(start, self.version(goal), self.look)]


def patches(first: int, last: int) -> list[tuple[RecordKind, int]]:
    return [(RecordKind.VERSION, number) for number in range(first, last + 1)]


# -- places --------------------------------------------------------------------------------------------------------


def test_a_run_begins_with_a_root_and_an_epoch_has_32_patches() -> None:
    run = Run(2 + 2 * EPOCH_PATCHES)
    assert EPOCH_PATCHES == 32
    places = [(r.epoch, r.index) for r in run.records.values()]
    assert places[:2] == [(0, 0), (0, 1)]
    assert places[32:34] == [(0, 32), (1, 1)]
    assert places[-2:] == [(1, 32), (2, 1)]


def test_a_root_and_the_last_patch_of_an_epoch_are_starts_of_epochs() -> None:
    run = Run(70, roots=(0, 40))
    starts = {Position.of(r).starts: r.version for r in run.records.values() if Position.of(r).at_start}
    assert starts == {0: 0, 1: 32, 2: 40}


def test_keys_sort_as_their_numbers_do() -> None:
    assert keys.manifest_key(9) < keys.manifest_key(10) < keys.manifest_key(1 << 53)
    assert keys.anchor_key(9) < keys.anchor_key(10)
    assert keys.squash_key(2, 5) == "squashes/02/0000000000000005"


# -- what may follow what ------------------------------------------------------------------------------------------


def test_the_next_version_is_accepted() -> None:
    run = Run(40)
    for number in range(1, 40):
        planner.accept(Position.of(run.version(number - 1)), run.version(number))


def test_a_record_of_another_run_is_refused() -> None:
    run = Run(3)
    held = replace(Position.of(run.version(1)), run=OTHER_RUN)
    with pytest.raises(ChainError) as caught:
        planner.accept(held, run.version(2))
    assert not isinstance(caught.value, MissingLinkError)
    assert (caught.value.expected, caught.value.actual) == (OTHER_RUN, RUN)


@pytest.mark.parametrize("held", [0, 2, None])
def test_a_version_that_does_not_follow_what_is_held_is_a_missing_link(held: int | None) -> None:
    run = Run(4)
    with pytest.raises(MissingLinkError):
        planner.accept(None if held is None else Position.of(run.version(held)), run.version(2))


def test_a_version_made_on_other_weights_is_a_missing_link() -> None:
    run = Run(3)
    with pytest.raises(MissingLinkError):
        planner.accept(replace(Position.of(run.version(1)), digest=digest(7)), run.version(2))


def test_a_root_is_reached_by_no_patch() -> None:
    run = Run(3, roots=(0, 2))
    with pytest.raises(MissingLinkError):
        planner.accept(Position.of(run.version(1)), run.version(2))


@pytest.mark.parametrize(("epoch", "index"), [(0, 1), (0, 3), (1, 1), (1, 2), (0, 32)])
def test_a_version_that_is_out_of_place_in_its_epoch_is_refused(epoch: int, index: int) -> None:
    run = Run(3)
    with pytest.raises(ChainError, match="wrong position in its epoch"):
        planner.accept(Position.of(run.version(1)), replace(run.version(2), epoch=epoch, index=index))


def test_a_squash_that_does_not_begin_at_an_epochs_start_is_refused() -> None:
    run = Run(33)
    odd = replace(run.version(32), kind=RecordKind.SQUASH, base=BaseRef(5, digest(5)))
    with pytest.raises(ChainError, match="wrong position in its epoch"):
        planner.accept(Position.of(run.version(5)), odd)


def test_an_anchor_follows_anything_of_its_run() -> None:
    run = Run(40)
    for held in (None, 0, 39):
        planner.accept(None if held is None else Position.of(run.version(held)), run.anchor(1))


# -- ways onward ---------------------------------------------------------------------------------------------------


def test_from_the_version_before_the_way_is_one_patch() -> None:
    assert Run(10).way(8, 9) == patches(9, 9)


def test_to_the_version_held_there_is_nothing_to_go() -> None:
    run = Run(10)
    assert run.way(4, 4) == []
    assert run.looks == []


def test_the_rest_of_an_epoch_is_gone_patch_by_patch() -> None:
    run = Run(40)
    run.squash(0, 0)
    assert run.way(3, 20) == patches(4, 20)
    assert not any(key.startswith("squashes") for key in run.looks)


def test_from_epoch_start_to_epoch_start_the_largest_squash_is_taken() -> None:
    run = Run(4 * 32 + 1)
    for level, number in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (2, 0)):
        run.squash(level, number)
    assert run.way(0, 128) == [(RecordKind.SQUASH, 128)]


def test_a_squash_that_leads_past_the_goal_is_not_taken() -> None:
    run = Run(4 * 32 + 1)
    run.squash(2, 0)
    run.squash(1, 0)
    assert run.way(0, 100) == [(RecordKind.SQUASH, 64), *patches(65, 100)]


def test_a_squash_of_one_epoch_stands_for_its_patches_when_the_goal_is_the_epochs_end() -> None:
    run = Run(33)
    run.squash(0, 0)
    assert run.way(0, 32) == [(RecordKind.SQUASH, 32)]


def test_where_a_squash_lacks_the_patches_of_that_epoch_are_taken() -> None:
    run = Run(4 * 32)
    run.squash(0, 0)
    run.squash(0, 2)
    assert run.way(0, 127) == [(RecordKind.SQUASH, 32), *patches(33, 64), (RecordKind.SQUASH, 96), *patches(97, 127)]


def test_a_long_way_is_a_few_squashes_found_with_few_looks() -> None:
    epochs = 200  # from 3 to 200: up to 4, 8, 16, … 128 and down again
    run = Run(epochs * 32 + 8)
    for level in range(8):
        for number in range(epochs >> level):
            run.squash(level, number)
    way = run.way(3 * 32 - 2, epochs * 32 + 5)
    squashes = [number for kind, number in way if kind == RecordKind.SQUASH]
    ends = [4, 8, 16, 32, 64, 128, 192, 200]
    assert squashes == [32 * end for end in ends]
    assert len(way) == 2 + len(ends) + 5
    assert len(run.looks) <= 2 + len(ends) + 5 + 2


@pytest.mark.parametrize("squashed", [True, False])
def test_looking_for_squashes_costs_a_look_for_each_size_and_epoch_at_most(squashed: bool) -> None:
    epochs = 16
    run = Run(epochs * 32 + 1)
    if squashed:
        run.squash(4, 0)
    run.way(0, epochs * 32)
    asked = [key for key in run.looks if key.startswith("squashes")]
    assert len(asked) == len(set(asked))
    assert len(asked) <= (1 if squashed else 2 * epochs)


def test_a_squash_that_does_not_fit_is_passed_over() -> None:
    run = Run(70)
    run.squash(0, 1)
    key = keys.squash_key(0, 1)
    run.records[key] = replace(run.records[key], base=BaseRef(32, digest(99)))
    assert run.way(32, 69) == patches(33, 69)


def test_a_squash_under_the_key_of_another_is_passed_over() -> None:
    run = Run(4 * 32 + 1)
    run.records[keys.squash_key(0, 0)] = run.squash(1, 0)
    del run.records[keys.squash_key(1, 0)]
    assert run.way(0, 40) == patches(1, 40)


def test_without_anchors_a_missing_version_ends_the_way() -> None:
    run = Run(10)
    del run.records[keys.manifest_key(5)]
    with pytest.raises(MissingLinkError) as caught:
        run.way(3, 8)
    assert caught.value.version == 8


def test_a_squash_leads_over_a_missing_version() -> None:
    run = Run(40)
    run.squash(0, 0)
    del run.records[keys.manifest_key(5)]
    assert run.way(0, 35) == [(RecordKind.SQUASH, 32), *patches(33, 35)]


def test_a_record_that_is_another_version_than_its_key_says_is_refused() -> None:
    run = Run(10)
    run.records[keys.manifest_key(5)] = run.version(6)
    with pytest.raises(ChainError):
        run.way(4, 8)


def test_a_way_that_leads_to_other_weights_than_the_goals_is_refused() -> None:
    run = Run(10)
    goal = replace(run.version(8), digest=digest(77))
    with pytest.raises(ChainError):
        find_path(Position.of(run.version(5)), goal, run.look)


def test_what_is_held_of_another_run_is_refused() -> None:
    run = Run(5)
    with pytest.raises(ChainError):
        find_path(replace(Position.of(run.version(2)), run=OTHER_RUN), run.version(4), run.look)


# -- anchors -------------------------------------------------------------------------------------------------------


def test_holding_nothing_the_way_begins_at_the_newest_anchor_at_or_before_the_goal() -> None:
    run = Run(100)
    for epoch in (0, 1, 2):
        run.anchor(epoch)
    assert run.way(None, 70) == [(RecordKind.ANCHOR, 64), *patches(65, 70)]
    assert run.way(None, 64) == [(RecordKind.ANCHOR, 64)]
    assert run.way(None, 63) == [(RecordKind.ANCHOR, 32), *patches(33, 63)]


def test_a_version_with_an_anchor_of_its_own_needs_nothing_else() -> None:
    run = Run(1)
    run.anchor(0)
    assert run.way(None, 0) == [(RecordKind.ANCHOR, 0)]


def test_joining_a_long_run_looks_at_few_records() -> None:
    run = Run(3000)
    run.anchor(90)
    run.records[keys.manifest_key(2950)] = replace(run.version(2950), anchor=90)
    assert run.way(None, 2950)[0] == (RecordKind.ANCHOR, 2880)
    assert len(run.looks) < 2950 - 2880 + 10


@pytest.mark.parametrize(("anchor_bytes", "takes_anchor"), [(600_000, True), (700_000, False)])
def test_between_an_anchor_and_patches_the_fewer_bytes_decide(anchor_bytes: int, takes_anchor: bool) -> None:
    run = Run(80, patch_bytes=10_000)
    run.anchor(2, anchor_bytes)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=2)
    way = run.way(1, 70)  # 69 patches, or an anchor and 6
    assert way[0] == ((RecordKind.ANCHOR, 64) if takes_anchor else (RecordKind.VERSION, 2))


def test_records_have_bytes_too() -> None:
    """Patches of a few bytes are not free: each is a record, which is fetched with them."""
    run = Run(200, patch_bytes=1)
    run.anchor(6, 100 * RECORD_BYTES)
    run.records[keys.manifest_key(199)] = replace(run.version(199), anchor=6)
    assert run.way(100, 199) == patches(101, 199)
    assert run.way(80, 199)[0] == (RecordKind.ANCHOR, 192)


def test_squashes_count_in_that_comparison() -> None:
    run = Run(80, patch_bytes=10)
    run.anchor(2, 200)
    run.squash(1, 0, 100)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=2)
    assert run.way(0, 70)[0] == (RecordKind.SQUASH, 64)


def test_no_anchor_is_looked_for_where_it_could_only_be_further_back() -> None:
    run = Run(80)
    run.anchor(1)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=1)
    assert run.way(40, 70) == patches(41, 70)
    assert not any(key.startswith("anchors") for key in run.looks)


def test_the_anchor_of_the_local_version_itself_is_not_looked_for() -> None:
    run = Run(80)
    run.anchor(2)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=2)
    assert run.way(64, 70) == patches(65, 70)
    assert not any(key.startswith("anchors") for key in run.looks)


@cache
def long_run(versions: int, every: int = 5, patch_bytes: int = 100_000, anchor_bytes: int = 10_000_000) -> Run:
    """A run with an anchor every N epochs, which the records name from half an epoch later on."""
    run, newest = Run(versions, patch_bytes), 0
    for number in range(versions):
        here = run.version(number)
        if here.index == EPOCH_PATCHES // 2 and here.epoch % every == 0:
            newest = here.epoch
        run.records[keys.manifest_key(number)] = replace(here, anchor=newest)
        if here.at_start and here.starts % every == 0:
            run.anchor(here.starts, anchor_bytes, newest)
    return run


@pytest.mark.parametrize("versions", [2_000, 10_000])
@pytest.mark.parametrize("late", [1, 9, 500, 1_000, None], ids=str)
def test_a_late_worker_looks_at_few_more_records_than_a_new_one(versions: int, late: int | None) -> None:
    """A walk over all versions since the local one would look at thousands, and then an anchor has fewer bytes."""
    run, goal = long_run(versions), versions - 50
    way = run.way(None, goal)
    new = len(run.looks)
    assert new <= len(way) + planner.NEWER + 15
    assert run.way(None if late is None else goal - late, goal) == (
        patches(goal - late + 1, goal) if late in (1, 9) else way
    )
    assert len(run.looks) <= new + 15


def test_a_way_onward_is_read_as_far_as_it_has_fewer_bytes_than_the_anchors() -> None:
    run = long_run(2_000)  # the anchor at 1,920 has the bytes of 100 patches
    for local, takes_anchor in ((1_830, False), (1_800, True)):
        way = run.way(local, 1_950)
        assert (way[0] == (RecordKind.ANCHOR, 1_920)) == takes_anchor
        assert len(set(run.looks)) <= 130 + 30 + planner.NEWER + 10


def test_a_way_onward_of_many_more_records_is_not_gone_however_few_bytes_they_have() -> None:
    run = long_run(2_000, patch_bytes=0, anchor_bytes=1 << 20)
    allowed = 1 + 30 + planner.MORE
    assert run.way(1_950 - allowed, 1_950) == patches(1_950 - allowed + 1, 1_950)
    assert run.way(1_950 - allowed - 1, 1_950)[0] == (RecordKind.ANCHOR, 1_920)
    assert len(run.looks) <= 30 + planner.NEWER + 10


def test_a_large_anchor_is_worth_more_records() -> None:
    run = long_run(2_000, patch_bytes=0, anchor_bytes=1500 * planner.MORE_BYTES)
    allowed = 1 + 30 + 1500
    assert run.way(1_950 - allowed, 1_950) == patches(1_950 - allowed + 1, 1_950)
    assert run.way(1_950 - allowed - 1, 1_950)[0] == (RecordKind.ANCHOR, 1_920)


def test_a_late_worker_takes_squashes_if_they_have_fewer_bytes() -> None:
    run = Run(64 * 32 + 10, patch_bytes=100_000)
    run.anchor(63, 10_000_000)
    goal = 64 * 32 + 5
    run.records[keys.manifest_key(goal)] = replace(run.version(goal), anchor=63)
    run.squash(5, 0)
    run.squash(5, 1)
    squashed = [(RecordKind.SQUASH, 1024), (RecordKind.SQUASH, 2048), *patches(2049, goal)]
    assert run.way(0, goal) == squashed
    assert run.way(20, goal)[0] == (RecordKind.ANCHOR, 63 * 32)
    run.squash(5, 0, 20_000_000)
    assert run.way(0, goal)[0] == (RecordKind.ANCHOR, 63 * 32)


def test_a_late_worker_whose_newest_anchor_cannot_be_used_goes_on_from_its_version() -> None:
    run = Run(80, patch_bytes=100)
    run.anchor(2, 10)
    run.records[keys.manifest_key(79)] = replace(run.version(79), anchor=2)
    del run.records[keys.anchor_key(2)]
    assert run.way(3, 79) == patches(4, 79)


def test_an_anchor_leads_over_a_missing_version() -> None:
    run = Run(80)
    run.anchor(2)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=2)
    del run.records[keys.manifest_key(50)]
    assert run.way(40, 70) == [(RecordKind.ANCHOR, 64), *patches(65, 70)]


def test_an_anchor_from_which_a_version_is_missing_gives_way_to_an_older_one_and_a_squash() -> None:
    run = Run(80)
    run.anchor(0)
    run.anchor(1)
    run.squash(1, 0)
    del run.records[keys.manifest_key(50)]
    assert run.way(None, 70) == [(RecordKind.ANCHOR, 0), (RecordKind.SQUASH, 64), *patches(65, 70)]


def test_an_anchor_that_is_gone_gives_way_to_the_one_before_it() -> None:
    run = Run(200)
    run.anchor(5, before=2)
    run.anchor(2)
    run.records[keys.manifest_key(199)] = replace(run.version(199), anchor=5)
    del run.records[keys.anchor_key(5)]
    assert run.way(None, 199)[0] == (RecordKind.ANCHOR, 64)


def test_an_anchor_names_the_one_before_it_however_far_that_is() -> None:
    run = Run(130 * 32 + 1)
    run.anchor(0)
    run.anchor(101, before=0)
    run.squash(6, 0)
    run.squash(6, 1)
    goal = 129 * 32 + 10
    run.records[keys.manifest_key(goal)] = replace(run.version(goal), anchor=101)
    del run.records[keys.manifest_key(101 * 32 + 1)]  # no path leads from the nearer anchor to the goal
    assert 101 - planner.SEARCH > 0
    way = run.way(None, goal)
    assert way[:3] == [(RecordKind.ANCHOR, 0), (RecordKind.SQUASH, 64 * 32), (RecordKind.SQUASH, 128 * 32)]


def test_the_search_for_an_anchor_has_an_end() -> None:
    run = Run(200 * 32)
    goal = 200 * 32 - 1
    with pytest.raises(MissingLinkError):
        run.way(None, goal)
    assert len(run.looks) <= planner.SEARCH + 3


def test_an_anchor_of_another_run_or_place_is_passed_over() -> None:
    run = Run(80)
    run.anchor(0)
    run.records[keys.anchor_key(2)] = replace(run.anchor(2), run=OTHER_RUN)
    run.records[keys.anchor_key(1)] = run.records[keys.anchor_key(0)]
    assert run.way(None, 70) == [(RecordKind.ANCHOR, 0), *patches(1, 70)]


def test_a_version_older_than_the_one_held_is_reached_from_an_anchor() -> None:
    run = Run(80)
    run.anchor(0)
    assert run.way(70, 10) == [(RecordKind.ANCHOR, 0), *patches(1, 10)]


# -- roots ---------------------------------------------------------------------------------------------------------


def test_a_later_root_is_reached_by_its_anchor_alone() -> None:
    run = Run(20, roots=(0, 10))
    run.anchor(0)
    run.anchor(1)
    assert run.way(3, 15) == [(RecordKind.ANCHOR, 10), *patches(11, 15)]
    assert run.way(None, 10) == [(RecordKind.ANCHOR, 10)]


def test_a_later_root_without_an_anchor_cannot_be_reached() -> None:
    run = Run(20, roots=(0, 10))
    run.anchor(0)
    with pytest.raises(MissingLinkError):
        run.way(3, 15)


def test_from_a_root_that_is_held_the_way_leads_on() -> None:
    run = Run(20, roots=(0, 10))
    assert run.way(10, 15) == patches(11, 15)


def test_an_epoch_that_a_root_cut_short_is_never_gone_over_by_patches() -> None:
    run = Run(80, roots=(0, 10))
    run.anchor(0)
    run.anchor(1)
    run.anchor(2)  # the root at 10 began epoch 1; that of epoch 2 is version 42
    assert run.way(None, 60)[0] == (RecordKind.ANCHOR, 42)
    assert run.way(5, 60)[0] == (RecordKind.ANCHOR, 42)


def test_a_version_that_does_not_follow_is_gone_round_by_an_anchor() -> None:
    run = Run(80)
    run.anchor(2)
    run.records[keys.manifest_key(70)] = replace(run.version(70), anchor=2)
    run.records[keys.manifest_key(41)] = replace(run.version(41), base=BaseRef(40, digest(99)))
    assert run.way(40, 70) == [(RecordKind.ANCHOR, 64), *patches(65, 70)]


# -- is it still the same run? -------------------------------------------------------------------------------------

HERE = Run(12)


def unchanged(published: Manifest | None, newest: Manifest | None = None) -> None:
    planner.check_unchanged(RUN, 7, digest(7), published, newest)


def test_a_run_is_the_same_while_the_local_version_is() -> None:
    unchanged(HERE.version(7))
    unchanged(HERE.version(7), HERE.version(3))  # a head that lags says nothing


def test_a_local_version_that_was_pruned_is_no_other_run() -> None:
    unchanged(None, HERE.version(11))


@pytest.mark.parametrize(
    ("published", "newest"),
    [
        (replace(HERE.version(7), run=OTHER_RUN), None),
        (None, replace(HERE.version(2), run=OTHER_RUN)),
        (None, replace(HERE.version(11), run=OTHER_RUN)),
    ],
    ids=["as long", "shorter", "longer"],
)
def test_another_run_is_replaced(published: Manifest | None, newest: Manifest | None) -> None:
    with pytest.raises(RunReplacedError, match="follow_replaced") as caught:
        unchanged(published, newest)
    assert (caught.value.version, caught.value.expected, caught.value.actual) == (7, RUN, OTHER_RUN)
    assert caught.value.run == OTHER_RUN


def test_another_state_of_the_local_version_is_a_fork() -> None:
    with pytest.raises(RunForkedError) as caught:
        unchanged(replace(HERE.version(7), digest=digest(99)))
    assert (caught.value.version, caught.value.run) == (7, RUN)
    assert (caught.value.expected, caught.value.actual) == (digest(7), digest(99))


def test_a_newest_version_below_the_local_one_is_rolled_back() -> None:
    with pytest.raises(RunRolledBackError) as caught:
        unchanged(None, HERE.version(6))
    assert (caught.value.version, caught.value.newest, caught.value.run) == (7, 6, RUN)
