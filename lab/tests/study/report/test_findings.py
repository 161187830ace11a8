"""What a recording says, on one whose figures are known."""

import pytest

from lab.tests.recordings import NAMES, header, made, step
from pulsesync_lab.study.recording import PatchBytes, Recording
from pulsesync_lab.study.report import findings
from pulsesync_lab.study.report.findings import ModelPart, Size, Spread, place


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("model.layers.3.mlp.experts.7.up_proj.weight", ModelPart("3", "mlp.experts.up_proj", 7)),
        ("transformer.h.11.attn.c_attn.bias", ModelPart("11", "attn.c_attn.bias")),
        ("model.embed_tokens.weight", ModelPart("–", "embed_tokens")),
        ("experts.2.weight", ModelPart("–", "experts", 2)),
        ("layers.0", ModelPart("0", "layers.0")),
        ("lm_head.weight", ModelPart("–", "lm_head")),
    ],
)
def test_a_name_says_where_a_tensor_is(name: str, where: ModelPart) -> None:
    assert place(name) == where


def test_sparsity_is_what_did_not_change() -> None:
    assert findings.sparsity(made()) == pytest.approx([0.99, 0.96, 0.98])


def test_windows_and_dtypes_are_shares_of_the_sample() -> None:
    assert dict(findings.window_sparsity(made(), 1)) == pytest.approx(dict.fromkeys(range(3), 0.99))
    assert dict(findings.window_sparsity(made(), 2)) == pytest.approx(dict.fromkeys((1, 2), 0.98))
    assert findings.dtype_sparsity(made(), "F16")[0] == pytest.approx((0, 0.9))
    assert findings.gradient_density(made())[0] == pytest.approx((0, 0.99))


def test_overlap_is_beside_what_chance_would_give() -> None:
    assert findings.overlap(made()) == [(1, 0.5), (2, 0.5)]
    assert dict(findings.chance(made())) == pytest.approx({1: 0.01, 2: 0.04})


def test_without_a_look_at_the_step_before_there_is_no_overlap() -> None:
    assert findings.overlap(Recording(header(), (step(0, 1, 1, 1, 1), step(1, 2, 2, 2, 2, again=0)))) == []


def test_warm_up_ends_where_the_rate_is_first_at_its_highest() -> None:
    assert findings.warm_up(made()) == 2
    level = Recording(header(), tuple(step(n, 1, 1, 1, 1, lr=1e-6) for n in range(3)))
    assert findings.warm_up(level) is None
    assert findings.warm_up(Recording(header(), (step(0, 1, 1, 1, 1, lr=None),))) is None


def test_a_plateau_takes_ten_steps() -> None:
    assert findings.plateau(made()) is None
    steps = tuple(step(n, *(4 * [10 if n < 5 else 20])) for n in range(10))
    assert findings.plateau(Recording(header(), steps)) == pytest.approx(0.98)


def test_sizes_are_means_and_what_was_not_predicted_is_not_zero() -> None:
    one, other = (
        step(n, 1, 1, 1, 1, sizes={"gap": PatchBytes(100 * n, 300), "plain": PatchBytes(None, 700)}) for n in (1, 3)
    )
    found = findings.sizes(Recording(header(), (one, other)))
    assert (found["gap"].predicted, found["gap"].real) == (200, 300)
    assert (found["plain"].predicted, found["plain"].real) == (None, 700)
    assert found["gap"].smaller(3000) == 10
    assert findings.prediction_error(Recording(header(), (one, other)), "gap") == pytest.approx(-1 / 3)
    assert findings.prediction_error(Recording(header(), (one, other)), "plain") is None


def test_tensors_are_sorted_by_how_much_changes() -> None:
    names = [name for name, _, _ in findings.by_tensor(made())]
    assert (names[0], names[-1]) == (
        "model.layers.0.mlp.experts.1.up_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    )


def test_layers_are_in_order_with_what_is_outside_first() -> None:
    found = findings.by_layer(made())
    assert list(found) == ["embed_tokens", "0", "1"]
    assert found["0"] == pytest.approx([0.01, 0.04, 0.02])


def test_kinds_and_experts_are_told_apart() -> None:
    assert findings.by_kind(made())["mlp.experts.up_proj", "0"] == pytest.approx(0.07 / 3)
    assert findings.by_expert(made()) == {("0", 0): [0.01, 0.04, 0.0], ("0", 1): [0.01, 0.04, 0.04]}


def test_shares_add_up_to_one() -> None:
    assert findings.shares([{1: 3}, {2: 1}]) == {1: 0.75, 2: 0.25}
    assert findings.shares([]) == {}


def test_a_spread_of_nothing_is_none() -> None:
    assert Spread.of([]) is None
    assert Spread.of([1.0, 3.0]) == Spread(2.0, 1.0, 3.0, 1.0)


def with_sizes(*sizes: dict[str, PatchBytes]) -> Recording:
    return Recording(header(), tuple(step(n, 1, 1, 1, 1, sizes=some) for n, some in enumerate(sizes)))


def test_predicted_and_real_bytes_are_of_the_same_steps() -> None:
    sizes = (PatchBytes(100, 90), PatchBytes(1000), PatchBytes(1000))
    found = findings.sizes(with_sizes(*({"gap": size, "plain": PatchBytes(7 + n)} for n, size in enumerate(sizes))))
    assert found == {"gap": Size(100, 90, 1), "plain": Size(7, None, 1)}


def test_codecs_are_compared_over_the_same_steps() -> None:
    """A run's first patch is long and by another codec; it must not count for one codec and not for the other."""
    first = {"context": PatchBytes(9000, 9000), "history": PatchBytes(9000)}
    later = [{"context": PatchBytes(110 + n), "history": PatchBytes(60 + n, 50 + n)} for n in (1, 2, 3)]
    found = findings.sizes(with_sizes(first, *later))
    assert found == {"context": Size(112, None, 3), "history": Size(62, 52, 3)}
    assert [size.smaller(5600) for size in found.values()] == [50, pytest.approx(5600 / 52)]


def test_a_step_that_one_codec_was_not_looked_at_in_counts_for_none() -> None:
    found = findings.sizes(with_sizes({"gap": PatchBytes(9000)}, {"gap": PatchBytes(20), "context": PatchBytes(10)}))
    assert found == {"gap": Size(20, None, 1), "context": Size(10, None, 1)}


def test_codecs_without_a_step_in_common_are_not_compared() -> None:
    """Counted by headers, a step has the codec that it was published with, and no other."""
    found = findings.sizes(with_sizes({"gap": PatchBytes(None, 900)}, *2 * [{"history": PatchBytes(None, 50)}]))
    assert found == {"gap": Size(None, 900, 1, comparable=False), "history": Size(None, 50, 2)}
    assert [size.smaller(5000) for size in found.values()] == [None, 100]


def test_full_bytes_are_those_of_each_tensor() -> None:
    told = {"cast": {NAMES[0]: "F32"}, "dtypes": {NAMES[1]: "I8", NAMES[2]: "of no kind"}}
    assert findings.full_bytes(Recording(header(facts=told), ())) == 4000 + 1000 + 2000 + 2000
    assert findings.full_bytes(Recording(header(facts={"cast": 3, "dtypes": "x"}), ())) == 8000


def test_updates_are_shares_of_the_sample() -> None:
    bare = step(3, 1, 1, 1, 1, moved={})
    assert findings.moved(Recording(header(), (*made().steps, bare))) == {-4: 0.075, 0: 0.15, 2: 0.025}
