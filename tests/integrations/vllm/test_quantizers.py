"""Quantised weights that follow a run, against the quantisers of vLLM and torchao, called here."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
pytest.importorskip("torchao", reason="torchao is NOT installed here; make test-vllm installs it")

from pulsesync import Publisher  # noqa: E402
from pulsesync.quantized import RECIPES, QuantizedSubscriber, quantize  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from pulsesync.testing import AdamUpdates  # noqa: E402

with warnings.catch_warnings():  # torchao and vLLM, when imported, use what torch has deprecated
    warnings.simplefilter("ignore")
    from tests.integrations.vllm import quantizers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
Tensors = dict[str, Any]
MATRICES = {"layers.0.mlp.weight": (384, 256), "layers.0.q_proj.weight": (128, 384)}


@pytest.fixture(autouse=True)
def _configured() -> Iterator[None]:
    with quantizers.configured():
        yield


def as_tensors(state: dict[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for name, bits in state.items()}


def test_there_is_a_quantiser_for_every_recipe() -> None:
    assert quantizers.QUANTIZERS.keys() == RECIPES.keys()


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_step_of_a_run_has_the_bits_of_the_engine(recipe: str) -> None:
    """Steps of Adam, as a real run has them, and a weight that comes, grows and goes."""
    updates, store = AdamUpdates({**MATRICES, "norm.weight": (384,)}, lr=1e-4), MemoryStore()
    publisher, now = Publisher(store), as_tensors(updates.state())
    worker = {name: torch.zeros_like(tensor) for name, tensor in quantize(now, recipe, MATRICES).items()}
    suffix = RECIPES[recipe].scale_suffix
    rescaled = requantized = 0
    with QuantizedSubscriber(store, recipe) as sub:
        for step in range(6):
            for n, name in enumerate(MATRICES):
                if step in (1, 2):
                    now[name][5 * step, 7 + n] = 2.0 * step
            publisher.publish(now, step=step)
            report = sub.sync(worker)
            for name in MATRICES:
                assert not quantizers.differing(recipe, now[name], worker[name], worker[name + suffix]), (step, name)
            assert torch.equal(worker["norm.weight"], now["norm.weight"])
            assert report.whole == (step == 0)
            rescaled, requantized = rescaled + report.rescaled, requantized + report.requantized
            now = as_tensors(updates.step())
        assert sub.verify() == sub.digest
    assert rescaled > 0
    assert requantized < 6 * sum(worker[name].numel() for name in MATRICES)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not name.startswith("torchao-fp8-block")])
def test_shapes_that_groups_do_not_divide_have_the_bits_of_the_engine(recipe: str) -> None:
    weights = torch.randn((131, 259), generator=torch.Generator().manual_seed(2)).bfloat16()
    weights[3] = 0  # a scale of zeros
    if recipe == "vllm-int8-channel":
        weights[3] = 1  # vLLM divides by it: what 0/0 is as an integer is for the machine to say
    assert not quantizers.differing(recipe, weights, *RECIPES[recipe].quantize(weights))
