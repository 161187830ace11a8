"""The quantisers of vLLM and torchao by the names of our recipes: their own code, which returns weights and scales."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.online import fp8
from vllm.model_executor.layers.quantization.online.int8 import Int8OnlineMoEMethod
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape, weight_amax
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from tests.quantized.torchao_quantizers import TORCHAO, Quantized


def vllm_fp8_tensor(weights: torch.Tensor) -> Quantized:
    """As Fp8PerTensorOnlineLinearMethod does it, but for its last step, a kernel for GPUs: here `forward_native`."""
    scale = fp8._fp8_scale(weight_amax(weights).reshape(1))
    last_step = QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR, compile_native=False)
    quantized: Quantized = last_step.forward_native(weights, scale)
    return quantized


def vllm_fp8_channel(weights: torch.Tensor) -> Quantized:
    scale = fp8._fp8_channel_scale(weight_amax(weights, dim=-1).unsqueeze(1))
    return fp8._fp8_quant_per_channel(weights, scale), scale


def vllm_fp8_block(weights: torch.Tensor) -> Quantized:
    quantized: Quantized = per_block_cast_to_fp8(weights)
    return quantized


def vllm_int8_channel(weights: torch.Tensor) -> Quantized:
    """As vLLM quantises the experts of a layer, of which this is the only one."""
    layer: Any = torch.nn.Module()
    layer.num_experts = layer.local_num_experts = 1
    for name in ("w13_weight", "w2_weight"):
        layer.register_parameter(name, torch.nn.Parameter(weights[None].clone(), requires_grad=False))
    Int8OnlineMoEMethod._quantize_weights(SimpleNamespace(moe=SimpleNamespace(tp_size=1)), layer)
    return layer.w13_weight[0], layer.w13_scale[0]


QUANTIZERS: dict[str, Callable[[torch.Tensor], Quantized]] = {
    "vllm-fp8-tensor": vllm_fp8_tensor,
    "vllm-fp8-channel": vllm_fp8_channel,
    "vllm-fp8-block": vllm_fp8_block,
    "vllm-int8-channel": vllm_int8_channel,
    **TORCHAO,
}


@contextmanager
def configured() -> Iterator[None]:
    """What vLLM's quantisers look up is there inside."""
    with set_current_vllm_config(VllmConfig()):
        yield


def differing(recipe: str, weights: torch.Tensor, quantized: torch.Tensor, scales: torch.Tensor) -> int:
    """How many bytes of quantised weights and their scales differ from what the engine makes of the weights."""
    theirs, their_scales = QUANTIZERS[recipe](weights)
    pairs = ((quantized, theirs), (scales, their_scales.float()))
    return sum(int((_bytes(ours) != _bytes(other)).sum()) for ours, other in pairs)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
