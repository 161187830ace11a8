"""Quantised weights, or the mirror from which they are made, to which something else has written."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from pulsesync import Publisher  # noqa: E402
from pulsesync.format import patch  # noqa: E402
from pulsesync.quantized import QuantizedSubscriber, quantize  # noqa: E402
from pulsesync.store import MemoryStore  # noqa: E402
from tests.foreign_writes import TENSOR, WRITES, train, weights  # noqa: E402
from tests.tiers import slow  # noqa: E402

RECIPE = "vllm-fp8-block"


def as_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    """Tensors in the same memory."""
    return {name: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for name, array in arrays.items()}


@pytest.mark.parametrize("codec", ["history", slow("gap")])
@pytest.mark.parametrize("where", ["tensors", "mirror"])
def test_what_something_else_has_written_is_quantised_again(where: str, codec: patch.CodecName) -> None:
    for name, write in WRITES.items():
        trained, rng, store = weights(ml_dtypes.bfloat16), np.random.default_rng(2), MemoryStore()
        expected = quantize(as_torch(trained), RECIPE, [TENSOR])
        worker = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
        with Publisher(store, codec=codec) as pub, QuantizedSubscriber(store, RECIPE) as sub:
            for _ in range(2):
                pub.publish(trained)
                sub.sync(worker)
                train(trained, rng)
            if where == "mirror":
                write(sub._mirror[TENSOR].view(torch.int16).numpy().view(ml_dtypes.bfloat16))
            else:
                write(worker[TENSOR].view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn))
            pub.publish(trained)
            train(trained, rng)
            pub.publish(trained)
            report = sub.sync(worker)
            if not report.whole:  # what no patch reads passes unnoticed until the weights are counted
                report = sub.sync(worker, verify=True)
            assert report.whole, (name, report)
            assert (TENSOR in report.plain.repaired) == (where == "mirror"), name
            sub.verify()
        for key, tensor in quantize(as_torch(trained), RECIPE, [TENSOR]).items():
            assert torch.equal(tensor.view(-1).view(torch.uint8), worker[key].view(-1).view(torch.uint8)), (name, key)
