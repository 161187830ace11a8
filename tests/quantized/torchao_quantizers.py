"""torchao's quantisers by the names of our recipes: its own code, which returns weights and scales."""

from collections.abc import Callable
from typing import Any

import torch
from torchao.quantization import PerBlock, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor
from torchao.quantization.quantize_.workflows.int8.int8_tensor import Int8Tensor

Quantized = tuple[torch.Tensor, torch.Tensor]


def _parts(tensor: Any) -> Quantized:
    return tensor.qdata, tensor.scale


TORCHAO: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "torchao-fp8-tensor": lambda weights: _parts(Float8Tensor.from_hp(weights, granularity=PerTensor())),
    "torchao-fp8-channel": lambda weights: _parts(Float8Tensor.from_hp(weights, granularity=PerRow())),
    "torchao-fp8-block": lambda weights: _parts(Float8Tensor.from_hp(weights, granularity=PerBlock([128, 128]))),
    "torchao-int8-channel": lambda weights: _parts(Int8Tensor.from_hp(weights, PerRow())),
}
