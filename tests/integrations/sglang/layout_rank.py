"""One rank of SGLang's own models: build each with its own weight loaders, and see where the maps say weights lie.

    python -m tests.integrations.sglang.layout_rank RANK RANKS EP PORT FOLDER...

Prints a line of JSON for each checkpoint: null if every weight is where the map says, else why not.
"""

import json
import sys
from pathlib import Path

from tests.integrations.sglang import absent

absent.install()

from safetensors.torch import load_file  # noqa: E402

from pulsesync.errors import StateError  # noqa: E402
from pulsesync.integrations.runtime import ModelShape, check_loaded, place, runtime_tensors  # noqa: E402
from pulsesync.integrations.sglang import SglangEngine  # noqa: E402
from tests.integrations.sglang.engine import build_model, publish_arguments, start_groups  # noqa: E402


def check(folder: Path) -> str | None:
    model = build_model(str(folder))
    weights = load_file(folder / "model.safetensors")
    engine = SglangEngine(model)
    engine.check()
    shape = ModelShape.from_config(engine.hf_config(), lm_head="lm_head.weight" in weights)
    try:
        placed = place(shape, engine.rank(), runtime_tensors(model))
        check_loaded(placed, {name: weights[name] for name in placed if name in weights})
    except StateError as e:
        return str(e)
    return None if placed.keys() >= weights.keys() or engine.rank().ep_size > 1 else "a tensor has no place"


if __name__ == "__main__":
    rank, ranks, ep, port = map(int, sys.argv[1:5])
    arguments = publish_arguments(ranks, sys.argv[5], rank, ep)
    start_groups(arguments, rank, ranks, port)
    for folder in map(Path, sys.argv[5:]):
        try:
            answer = check(folder)
        except Exception as e:  # noqa: BLE001 - the test reports it
            answer = f"{type(e).__name__}: {e}"
        print(json.dumps({folder.name: answer}), flush=True)
