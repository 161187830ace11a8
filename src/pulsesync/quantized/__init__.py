"""Quantised weights of a worker, kept at the versions of a run of plain weights. It needs torch.

    from pulsesync.quantized import QuantizedSubscriber

    QuantizedSubscriber("runs/one", "vllm-fp8-block").sync(weights)     # FP8 matrices, and their scales

See docs/integrations/quantized.md.
"""

from typing import TYPE_CHECKING, Any

from pulsesync.core.extras import load

if TYPE_CHECKING:
    from pulsesync.quantized.recipes import RECIPES as RECIPES
    from pulsesync.quantized.recipes import Recipe as Recipe
    from pulsesync.quantized.recipes import quantize as quantize
    from pulsesync.quantized.subscriber import QuantizedReport as QuantizedReport
    from pulsesync.quantized.subscriber import QuantizedSubscriber as QuantizedSubscriber

_MODULES = {
    "QuantizedReport": "subscriber",
    "QuantizedSubscriber": "subscriber",
    "RECIPES": "recipes",
    "Recipe": "recipes",
    "quantize": "recipes",
}
__all__ = ["RECIPES", "QuantizedReport", "QuantizedSubscriber", "Recipe", "quantize"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(load(f"{__name__}.{_MODULES[name]}", "torch"), name)
