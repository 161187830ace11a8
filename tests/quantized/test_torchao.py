"""The recipes of torchao against torchao, on the device at hand: it needs no engine, so that it runs on a GPU, too."""

import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # torchao, when imported, uses what torch has deprecated
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao", reason="torchao is NOT installed here; make test-vllm compares with it on a CPU")
    from tests.quantized.torchao_quantizers import TORCHAO

from pulsesync.quantized import RECIPES  # noqa: E402


@pytest.mark.parametrize("recipe", TORCHAO)
@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_a_matrix_has_the_bits_of_torchao(recipe: str, spread: float, device: str) -> None:
    weights = (torch.randn((512, 1024), generator=torch.Generator().manual_seed(1)) * spread).bfloat16().to(device)
    theirs, their_scales = TORCHAO[recipe](weights)
    ours, scales = RECIPES[recipe].quantize(weights)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert torch.equal(scales.reshape(-1).view(torch.int32), their_scales.float().reshape(-1).view(torch.int32))
