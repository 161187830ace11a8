"""The optimizers that are compared."""

import pytest
import torch
from torch import nn

from lab.tests.study.experiments.arms import TINY, tiny
from pulsesync_lab.demo.policy import Policy
from pulsesync_lab.study.experiments.loop import warm_up
from pulsesync_lab.study.experiments.optimizers import Lion, Pair, make_optimizer


def test_lion_moves_every_weight_by_the_rate_along_the_sign_of_its_average() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    lion = Lion([weight], lr=0.5, betas=(0.9, 0.5))
    weight.grad = torch.tensor([3.0, -0.1, 0.0])
    lion.step()
    assert weight.tolist() == [0.5, 1.5, 1.0]
    weight.grad = torch.tensor([-1.0, 5.0, 0.0])
    lion.step()  # averages are 1.5 and -0.05: 0.9 · 1.5 - 0.1 · 1 > 0, and -0.045 + 0.5 > 0
    assert weight.tolist() == [0.0, 1.0, 1.0]


def test_lion_leaves_weights_without_gradient() -> None:
    weight = nn.Parameter(torch.ones(2))
    Lion([weight], lr=0.5).step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="NOT TESTED: this torch has no Muon")
def test_muon_takes_the_matrices_inside_layers_and_adamw_the_rest() -> None:
    policy = Policy(TINY)
    pair = make_optimizer(tiny(optimizer="muon", lr=0.25), policy)
    assert isinstance(pair, Pair)
    names = {id(weight): name for name, weight in policy.named_parameters()}
    muon, adamw = ({names[id(w)] for group in one.param_groups for w in group["params"]} for one in pair.pair)
    assert type(pair.pair[0]) is torch.optim.Muon
    assert muon == {f"layers.0.{name}.weight" for name in ("qkv", "out", "up", "down")}
    assert muon | adamw == set(names.values())
    assert not muon & adamw
    assert {group["lr"] for group in pair.param_groups} == {0.25}


def test_hooks_and_rates_of_a_pair_reach_both() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    pair = warm_up(Pair(torch.optim.SGD([one], lr=1.0), torch.optim.SGD([two], lr=2.0)), 4)
    seen = []
    pair.register_step_post_hook(lambda *_: seen.append((one.item(), two.item())))
    for _ in range(5):
        one.grad, two.grad = torch.ones(1), torch.ones(1)
        pair.step()
    assert seen == [(-0.25, -0.5), (-0.75, -1.5), (-1.5, -3.0), (-2.5, -5.0), (-3.5, -7.0)]


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = warm_up(torch.optim.SGD([weight], lr=1.0), 0)
    weight.grad = torch.ones(1)
    optimizer.step()
    assert weight.item() == -1.0


@pytest.mark.parametrize("masters", ["fp32", "rounded"])
def test_rounding_after_a_step_loses_small_updates(masters: str) -> None:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = make_optimizer(tiny(lr=1e-4, masters=masters), layer)
    layer.weight.grad = torch.ones(1, 2)
    optimizer.step()
    assert (layer.weight == 1.0).all().item() == (masters == "rounded")
