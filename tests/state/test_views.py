from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pulsesync.core.types import BLOCK, DTYPES, TensorSpec
from pulsesync.errors import StateError
from pulsesync.format import layout as layouts
from pulsesync.state.views import new_tensors, other_names, read_cast, read_published, torch_dtype, view_bits
from pulsesync.testing import random_bits

pytest.importorskip("torch")
import torch

ARRAYS = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
}
TENSORS = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


def test_every_dtype_of_the_format_is_covered_here() -> None:
    assert ARRAYS.keys() == TENSORS.keys() == DTYPES.keys()


def test_every_dtype_of_the_format_has_one_of_torch() -> None:
    assert {dtype: torch_dtype(dtype) for dtype in DTYPES} == TENSORS


def one(source: Any) -> Any:
    views, ties = view_bits({"w": source})
    assert ties == {}
    return views["w"]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_an_array_is_viewed_in_its_own_memory(dtype: str) -> None:
    array = np.zeros((2, 3), ARRAYS[dtype])
    view = one(array)
    assert (view.spec.dtype, view.spec.shape, view.shared) == (dtype, (2, 3), True)
    view.flat[4] = 1
    assert array.view(DTYPES[dtype].bits).reshape(-1).tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_torch_tensor_is_viewed_in_its_own_memory(dtype: str) -> None:
    tensor = torch.zeros((2, 3), dtype=TENSORS[dtype])
    view = one(tensor)
    assert (view.spec.dtype, view.spec.shape, view.shared) == (dtype, (2, 3), True)
    view.flat[4] = 1
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    assert tensor.view(integers).reshape(-1).tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("bits", [0x8000, 0x7FC1, 0xFF81, 0x0001, 0x7F80])
def test_bits_that_arithmetic_would_not_keep_are_kept(bits: int) -> None:
    tensor = torch.tensor([bits - (1 << 16) if bits >> 15 else bits], dtype=torch.int16).view(torch.bfloat16)
    assert one(tensor).flat.tolist() == [bits]


@pytest.mark.parametrize("make", [lambda: np.zeros((), np.float32), lambda: torch.zeros((), dtype=torch.float32)])
def test_a_scalar_has_no_dimensions_and_is_written_in_place(make: Any) -> None:
    scalar = make()
    view = one(scalar)
    assert (view.spec.shape, view.flat.size, view.shared) == ((), 1, True)
    view.flat[0] = 0x3F800000
    assert scalar.item() == 1.0


@pytest.mark.parametrize("make", [lambda: np.zeros((3, 0), np.float16), lambda: torch.zeros((3, 0))])
def test_a_tensor_of_nothing_is_a_tensor(make: Any) -> None:
    assert one(make()).spec.shape == (3, 0)


@pytest.mark.parametrize(
    "source",
    [np.arange(12, dtype=np.int32).reshape(3, 4).T, torch.arange(12, dtype=torch.int32).reshape(3, 4).T],
    ids=["numpy", "torch"],
)
def test_a_transposed_tensor_is_read_in_its_own_order_but_not_shared(source: Any) -> None:
    view = one(source)
    assert view.flat.tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert not view.shared


def test_an_expanded_tensor_is_not_shared() -> None:
    assert not one(torch.zeros(1).expand(5)).shared


def test_a_read_only_array_is_not_shared() -> None:
    array = np.zeros(3)
    array.flags.writeable = False
    assert not one(array).shared


def test_a_slice_of_rows_is_shared() -> None:
    memory = torch.zeros(4, 3)
    one(memory[1:3]).flat[0] = 0x3F800000
    assert memory[1, 0].item() == 1.0


def test_a_parameter_that_wants_gradients_is_viewed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    one(parameter).flat[1] = 0x3F800000
    assert parameter.tolist() == [0.0, 1.0, 0.0]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4, dtype=torch.bfloat16)
        self.norm = torch.nn.LayerNorm(4)
        self.head = torch.nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))


def test_a_module_is_viewed_by_its_state_dict_with_ties() -> None:
    module = Tied()
    views, ties = view_bits(module)
    assert ties == {"head.weight": "embed.weight"}
    assert {name: (view.spec.dtype, view.spec.shape) for name, view in views.items()} == {
        "embed.weight": ("BF16", (5, 4)),
        "norm.bias": ("F32", (4,)),
        "norm.weight": ("F32", (4,)),
        "steps": ("I64", ()),
    }
    views["embed.weight"].flat[:] = 0x3F80
    assert module.head.weight.eq(1).all()


def test_a_state_dict_and_its_module_are_viewed_alike() -> None:
    module = Tied()
    views, ties = view_bits(module)
    again, ties_again = view_bits(module.state_dict())
    assert ties == ties_again
    assert {n: v.spec for n, v in views.items()} == {n: v.spec for n, v in again.items()}


def test_names_are_taken_in_the_order_of_their_bytes() -> None:
    memory = np.zeros(3)
    assert view_bits({"z": memory, "Z": memory, "é": memory})[1] == {"z": "Z", "é": "Z"}


def test_equal_tensors_in_other_memory_are_not_tied() -> None:
    assert view_bits({"a": np.zeros(3), "b": np.zeros(3)})[1] == {}


@pytest.mark.parametrize("other", ["shape", "dtype"])
def test_the_same_memory_seen_as_another_shape_or_dtype_is_not_tied(other: str) -> None:
    memory = np.zeros((2, 3), np.float32)
    seen = memory.reshape(3, 2) if other == "shape" else memory.view(np.int32)
    assert view_bits({"a": memory, "b": seen})[1] == {}


@pytest.mark.parametrize(
    "source",
    [
        [1.0],
        3.0,
        "weights",
        None,
        np.zeros(3, np.complex64),
        np.zeros(3, ">f4"),
        np.zeros(3, "S4"),
        np.zeros(3, object),
        np.zeros(3, ml_dtypes.float8_e4m3),
        torch.zeros(3, dtype=torch.complex64),
        torch.zeros(3, device="meta"),
    ],
    ids=lambda source: f"{type(source).__name__} {getattr(source, 'dtype', '')}",
)
def test_what_is_no_tensor_of_the_format_is_refused_by_name(source: Any) -> None:
    with pytest.raises(StateError, match="'w'") as caught:
        view_bits({"w": source})
    assert caught.value.tensor == "w"


@pytest.mark.parametrize(
    "source",
    [torch.eye(3).to_sparse(), torch.zeros(3, dtype=torch.complex64).conj().imag],
    ids=["sparse", "lazily negated"],
)
def test_a_torch_tensor_without_plain_memory_is_refused_by_name(source: Any) -> None:
    with pytest.raises(StateError, match="'w'"):
        view_bits({"w": source})


@pytest.mark.parametrize("source", [[np.zeros(3)], np.zeros(3), 3, None])
def test_what_holds_no_tensors_is_refused(source: Any) -> None:
    with pytest.raises(StateError, match=type(source).__name__):
        view_bits(source)


@pytest.mark.parametrize("name", [0, None, "\ud800"], ids=repr)
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(StateError):
        view_bits({name: np.zeros(3)})


# -- what is published ---------------------------------------------------------------------------------------------

CASTS = {"BF16": "bfloat16", "F16": "float16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}


def blocks_of(source: Any, cast: str, grid: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())) -> Any:
    """A matrix as it is published, put together again from the blocks of its tiles."""
    published, _ = read_published({"w": source}, {"*": cast})
    spec = published.spec("w")
    out = np.zeros(spec.size, spec.kind.bits)
    for tile in layouts.make([TensorSpec("w", spec.dtype, spec.shape, *grid)]).tiles:
        for number in range(tile.block_count):
            bits = published.block(tile, number)
            out[tile.flat_indices(np.arange(bits.size) + number * BLOCK)] = bits
    return out.reshape(spec.shape)


def fp32(shape: tuple[int, ...]) -> Any:
    return random_bits(np.random.default_rng(0), np.uint32, shape).view(np.float32)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("grid", [((), ()), ((10, 33), (7,))], ids=["whole", "tiles"])
def test_fp32_of_torch_is_cast_block_by_block_as_torch_does(cast: str, grid: Any) -> None:
    source = torch.from_numpy(fp32((50, 40)))
    expected = source.to(TENSORS[cast]).view(getattr(torch, f"uint{8 * DTYPES[cast].itemsize}")).numpy()
    assert np.array_equal(blocks_of(source, cast, grid), expected)


@pytest.mark.parametrize("cast", CASTS)
def test_fp32_of_numpy_is_cast_block_by_block_as_numpy_does(cast: str) -> None:
    source = fp32((50, 40))
    with np.errstate(all="ignore"):
        expected = source.astype(ARRAYS[cast])
    assert np.array_equal(blocks_of(source, cast, ((10, 33), (7,))), expected.view(DTYPES[cast].bits))


def test_nan_stays_nan_and_infinity_infinity() -> None:
    source = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0], np.float32)
    for made in (source, torch.from_numpy(source)):
        found = blocks_of(made, "BF16").view(ml_dtypes.bfloat16).astype(np.float32)
        assert np.isnan(found[:2]).all()
        assert found[2:4].tolist() == [np.inf, -np.inf]
        assert np.signbit(found[4])


def test_what_is_not_fp32_is_never_cast() -> None:
    for dtype in (ml_dtypes.bfloat16, np.int32, ml_dtypes.float8_e4m3fn, np.float64):
        assert read_published({"w": np.ones(3, dtype)}, {"*": "BF16"})[0].dtypes == {}
    halves = np.ones(3, np.float16)  # a worker that expects BF16 would refuse them
    with pytest.raises(StateError, match="converts FP32 only"):
        read_published({"w": halves}, {"*": "BF16"})
    assert read_published({"w": halves}, {"w": "", "*": "BF16"})[0].dtypes == {}


def test_the_first_pattern_that_fits_says_what_a_tensor_is_cast_to() -> None:
    source = {name: np.ones(3, np.float32) for name in ("a.norm", "a.weight", "b")}
    published, _ = read_published(source, {"*.norm": "", "a.*": "F16", "*": "BF16"})
    assert published.dtypes == {"a.weight": "F16", "b": "BF16"}
    assert [published.spec(name).dtype for name in source] == ["F32", "F16", "BF16"]


@pytest.mark.parametrize("dtype", ["F32", "float64", "INT4"])
def test_what_fp32_is_not_cast_to_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=dtype):
        read_cast({"*": dtype})


def test_new_tensors_are_zeros_that_view_as_what_was_asked_for() -> None:
    specs = [TensorSpec(f"{dtype}{shape}", dtype, shape) for dtype in DTYPES for shape in ((), (0,), (2, 3))]
    views, ties = view_bits(new_tensors(specs))
    assert ties == {}
    assert {view.spec for view in views.values()} == set(specs)
    assert not any(view.flat.any() for view in views.values())


def test_what_owns_a_tensor_is_known() -> None:
    views, _ = view_bits({"numpy": np.ones(3), "torch": torch.ones(3)})
    assert (views["numpy"].of_torch, views["torch"].of_torch) == (False, True)


def test_names_that_differ_are_counted_and_the_first_are_listed() -> None:
    error = other_names(["a", "b", "c", "d"], ["x"], "; a process that has a part of the model passes slices=")
    assert str(error) == (
        "the run has 4 tensors ('a', 'b', 'c', …), and this model does not; this model has tensor 'x', and the run "
        "does not. The weights are unchanged. Pass tensors with the names that the trainer publishes; a process that "
        "has a part of the model passes slices="
    )
    assert error.tensor == "a"


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.module."])
def test_names_that_differ_only_by_a_prefix_are_recognised(prefix: str) -> None:
    plain = ["norm.weight", "weight"]
    longer = [prefix + name for name in plain]
    assert f"The local names begin with {prefix!r}" in str(other_names(plain, [*longer, f"{prefix}tied.weight"]))
    assert f"The names in the run begin with {prefix!r}" in str(other_names(longer, plain))
    assert "begin with" not in str(other_names(plain, [*longer[:1], f"{prefix}other"]))
