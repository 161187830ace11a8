"""Quantisation of weights to FP8 or INT8: the formulas of the engines that serve them, bit for bit.

A group of weights has one scale, which is computed from its largest magnitude. A recipe has two formulas: from largest
magnitudes to scales, and from weights and their scales to quantised weights. Both work on each number separately, so
the bits are the same whether all weights are quantised or a few of them. They are written as in the engine:
multiplication by a reciprocal, for example, is not division, and division in BF16 is not division in FP32.

On a GPU, torch divides by a Python number by multiplying with its reciprocal, so some recipes yield other bits there
than on a CPU. The engines that they come from do the same.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pulsesync.core.arguments import one_of
from pulsesync.state.views import mapping_of

Formula = Callable[..., torch.Tensor]
INTEGERS = {2: torch.int16, 4: torch.int32}  # for the dtypes of weights before they are quantised
CHUNK = 1 << 24  # weights that are quantised at a time: the formulas need several times the memory of the weights
FP8_MAX = 448.0


@dataclass(frozen=True)
class Recipe:
    """A method to quantise matrices.

    Args:
        name: Its name: the engine, the dtype, and the unit that has one scale.
        dtype: Of the quantised weights.
        group: The number of rows and columns of a matrix that share one scale; None: all of them.
        scale_suffix: The suffix of a weight's name for the name of its scales.
        scale: From the largest magnitudes of groups, in the dtype of the weights, to their scales in FP32.
        encode: From weights, and for each the scale of its group, to quantised weights.
    """

    name: str
    dtype: torch.dtype
    group: tuple[int | None, int | None]
    scale_suffix: str
    scale: Formula
    encode: Formula

    def group_shape(self, shape: "tuple[int, ...] | torch.Size") -> tuple[int, int]:
        """The rows and columns of a group of a matrix."""
        rows, columns = self.group
        return (rows or max(shape[0], 1), columns or max(shape[1], 1))

    def scale_shape(self, shape: "tuple[int, ...] | torch.Size") -> tuple[int, int]:
        """The number of groups along the rows and the columns of a matrix."""
        rows, columns = self.group_shape(shape)
        return (-(-shape[0] // rows), -(-shape[1] // columns))

    def largest(self, weights: torch.Tensor) -> torch.Tensor:
        """The largest magnitude of each group of a matrix; NaN where a group has one."""
        rows, columns = self.group_shape(weights.shape)
        down, across = self.scale_shape(weights.shape)
        magnitudes = magnitude_bits(weights)
        if magnitudes.shape != (down * rows, across * columns):
            magnitudes = torch.nn.functional.pad(
                magnitudes, (0, across * columns - magnitudes.shape[1], 0, down * rows - magnitudes.shape[0])
            )
        return magnitudes.view(down, rows, across, columns).amax((1, 3)).view(weights.dtype)

    def encode_matrix(self, weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Quantise a matrix with the scales of its groups."""
        rows, columns = self.group_shape(weights.shape)
        out = torch.empty(weights.shape, dtype=self.dtype, device=weights.device)
        some = max(CHUNK // max(weights.shape[1], 1), 1)
        wide = scales.repeat_interleave(columns, 1)[:, : weights.shape[1]] if columns > 1 < scales.shape[1] else scales
        for begin in range(0, weights.shape[0], some):
            part = weights[begin : begin + some]
            row_groups = torch.arange(begin, begin + part.shape[0], device=weights.device) // rows
            out[begin : begin + some] = self.encode(part, wide[row_groups])
        return out

    def quantize(self, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantise a matrix; return it with the scales of its groups, which are also a matrix."""
        scales = self.scale(self.largest(weights))
        return self.encode_matrix(weights, scales), scales


def magnitude_bits(weights: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers, which have the same order; NaN is the largest."""
    bits = weights.view(INTEGERS[weights.element_size()])
    return bits & torch.iinfo(bits.dtype).max


def quantize(source: Any, recipe: "str | Recipe", names: Collection[str]) -> dict[str, torch.Tensor]:
    """Quantise some matrices of a module, state dict or mapping: for a trainer that publishes FP8 or INT8.

    Returns all tensors by name: the matrices quantised, their scales as separate tensors, the others unchanged.

    Args:
        source: The weights.
        recipe: A recipe, or the name of one in `RECIPES`.
        names: Of the matrices to quantise.

    Raises:
        ValueError: there is no recipe of that name; a name is not that of a matrix; or scales would have the name of
            another tensor.
    """
    recipe = find_recipe(recipe)
    tensors = {n: one.detach() if isinstance(one, torch.Tensor) else one for n, one in mapping_of(source).items()}
    for name in names:
        if name not in tensors or tensors[name].dim() != 2:
            raise ValueError(f"names must be names of matrices in the source; {name!r} is not one")
        if (scales := name + recipe.scale_suffix) in tensors:
            raise ValueError(f"the scales of {name!r} would be called {scales!r}, which is the name of another tensor")
        tensors[name], tensors[scales] = recipe.quantize(tensors[name])
    return tensors


def find_recipe(recipe: "str | Recipe") -> Recipe:
    """A recipe by its name. Raises: ValueError."""
    if isinstance(recipe, Recipe):
        return recipe
    return RECIPES[one_of("recipe", recipe, RECIPES)]


# vLLM 0.32: layers quantised while a BF16 checkpoint is loaded


def _vllm_scale(largest: torch.Tensor) -> torch.Tensor:
    return largest.float() / torch.tensor(FP8_MAX, device=largest.device)


def _vllm_channel_scale(largest: torch.Tensor) -> torch.Tensor:
    least = 1.0 / (torch.tensor(FP8_MAX, device=largest.device) * 512)
    return _vllm_scale(largest).clamp_min(least)


def _vllm_block_scale(largest: torch.Tensor) -> torch.Tensor:
    return largest.float().clamp(1e-4) / FP8_MAX


def _vllm_int8_scale(largest: torch.Tensor) -> torch.Tensor:
    return (largest / 127).float()


def _multiply_to_fp8(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weights.float() * scales.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _multiply_to_fp8_unclamped(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weights.float() * (1.0 / scales)).to(torch.float8_e4m3fn)


def _divide_to_fp8(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (weights.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _divide_to_int8(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return weights.div(scales.to(weights.dtype)).round().clamp(-127, 127).to(torch.int8)


# torchao 0.18: Float8Tensor.from_hp and Int8Tensor.from_hp


def _torchao_scale(largest: torch.Tensor) -> torch.Tensor:
    return (largest / FP8_MAX).float()


def _torchao_int8_scale(largest: torch.Tensor) -> torch.Tensor:
    return (largest / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()


def _multiply_to_int8(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.round(weights * (1.0 / scales)).clamp(-128, 127).to(torch.int8)


_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_TENSOR, _CHANNEL, _BLOCK = (None, None), (1, None), (128, 128)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("vllm-fp8-tensor", _FP8, _TENSOR, "_scale", _vllm_scale, _multiply_to_fp8),
        Recipe("vllm-fp8-channel", _FP8, _CHANNEL, "_scale", _vllm_channel_scale, _divide_to_fp8),
        Recipe("vllm-fp8-block", _FP8, _BLOCK, "_scale_inv", _vllm_block_scale, _multiply_to_fp8_unclamped),
        Recipe("vllm-int8-channel", _INT8, _CHANNEL, "_scale", _vllm_int8_scale, _divide_to_int8),
        Recipe("torchao-fp8-tensor", _FP8, _TENSOR, "_scale", _torchao_scale, _divide_to_fp8),
        Recipe("torchao-fp8-channel", _FP8, _CHANNEL, "_scale", _torchao_scale, _divide_to_fp8),
        Recipe("torchao-fp8-block", _FP8, _BLOCK, "_scale", _torchao_scale, _divide_to_fp8),
        Recipe("torchao-int8-channel", _INT8, _CHANNEL, "_scale", _torchao_int8_scale, _multiply_to_int8),
    )
}
"""The ways to quantise, by name: those of vLLM and torchao."""
