"""The policy of rollouts: weights as a worker has them."""

import copy
from collections import deque

import torch
from torch import Tensor, nn


class Follower:
    """A copy of a policy with its BF16 values of some calls ago."""

    def __init__(self, policy: nn.Module, delay: int) -> None:
        self._policy, self._own = policy, copy.deepcopy(policy).requires_grad_(False)
        self._published: deque[list[Tensor]] = deque(maxlen=delay + 1)

    @torch.no_grad()
    def follow(self) -> nn.Module:
        """Publish the current weights; return a policy with the weights published `delay` calls before."""
        self._published.append([weight.to(torch.bfloat16, copy=True) for weight in self._policy.parameters()])
        for own, weight in zip(self._own.parameters(), self._published[0], strict=True):
            own.copy_(weight)
        return self._own
