"""Ranks of SGLang's own models: build each with its own weight loaders, and see where the maps say weights lie.

    python -m tests.integrations.sglang.layout_ranks JOBS

JOBS is a list, in JSON: of the number of ranks, over how many of them experts are spread, and the folders of the
checkpoints. Prints a list for each job, last: of what each rank found for each checkpoint, by its name; null if every
weight is where the map says, else why not. The ranks are forked from a process that has imported SGLang, which takes
much longer than what they do.
"""

import json
import multiprocessing
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.integrations.sglang import absent

absent.install()

from safetensors.torch import load_file  # noqa: E402

from pulsesync.errors import StateError  # noqa: E402
from pulsesync.integrations.runtime import ModelShape, check_loaded, place, runtime_tensors  # noqa: E402
from pulsesync.integrations.sglang import SglangEngine  # noqa: E402
from tests.integrations.sglang.engine import build_model, import_sglang, publish_arguments, start_groups  # noqa: E402


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


def run_rank(rank: int, ranks: int, ep: int, port: int, folders: list[str], answers: Any) -> None:
    start_groups(publish_arguments(ranks, folders[0], rank, ep), rank, ranks, port)
    found = {}
    for folder in map(Path, folders):
        try:
            found[folder.name] = check(folder)
        except Exception as e:  # noqa: BLE001 - the test reports it
            found[folder.name] = f"{type(e).__name__}: {e}"
    answers.put((rank, found))


def main(jobs: list[tuple[int, int, list[str]]]) -> None:
    import_sglang()
    for family in {Path(folder).name.partition("-")[0] for _, _, folders in jobs for folder in folders} - {"phi3"}:
        import_module(f"sglang.srt.models.{family}")
    context, found = multiprocessing.get_context("fork"), []
    for ranks, ep, folders in jobs:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        answers = context.SimpleQueue()
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, ep, port, folders, answers), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode:
                sys.exit(f"a rank ended with {process.exitcode}")
        found.append([answer for _, answer in sorted(answers.get() for _ in processes)])
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
