"""Optimizers that wait, before each step, until no comparison reads the weights any more."""

from collections.abc import Callable
from typing import Any


class OptimizerHolds:
    """The hooks of the optimizers that a publisher holds.

    Args:
        wait: Waits until no comparison reads the weights.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, optimizer: Any) -> None:
        """Hold an optimizer. Raises: TypeError, if it has no hooks before its steps."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is None:
            raise TypeError(
                "hold needs an optimizer with register_step_pre_hook, as every torch.optim.Optimizer has; got "
                f"{type(optimizer).__name__}"
            )
        self._hooks.append(register(lambda *_: self._wait()))

    def release(self) -> None:
        for hook in self._hooks:
            hook.remove()
