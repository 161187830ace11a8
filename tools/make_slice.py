"""Cut lab/src/pulsesync_lab/demo/data/grpo-slice.npz out of the recorded run; README.md in that folder describes it.

python -m tools.make_slice --trace DIR --gguf SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import recording
from pulsesync_lab.demo.replay import RECORDED

# One of each kind: attention in, attention out, feed-forward, a tensor that changes much more than the rest (v_proj),
# a norm whose weights are small enough to move, and one that never changes.
TENSORS = [
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.self_attn.v_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.29.self_attn.o_proj.weight",
    "model.norm.weight",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recording.add_arguments(parser, required=True)
    parser.add_argument("--out", type=Path, default=RECORDED)
    arguments = parser.parse_args()

    def flat(state: recording.State) -> recording.Bits:
        return np.concatenate([state[name].reshape(-1) for name in TENSORS])

    columns: dict[str, Any] = {"names": np.array(TENSORS)}
    for step, old, new in recording.load(arguments.trace, arguments.gguf).steps():
        if step == 0:
            columns |= {f"start/{name}": old[name].copy() for name in TENSORS}
        before, after = flat(old), flat(new)
        positions = np.flatnonzero(before != after)
        columns[f"gaps/{step}"] = (np.diff(positions, prepend=-1) - 1).astype(np.uint32)
        columns[f"flips/{step}"] = before[positions] ^ after[positions]
        print(f"step {step}: {len(positions)} of {len(after)} changed")
    columns["final_sha256"] = np.array(hashlib.sha256(after.astype("<u2").tobytes()).hexdigest())
    np.savez_compressed(arguments.out, **columns)
    print(f"{arguments.out.stat().st_size} bytes, final state {columns['final_sha256']}")


if __name__ == "__main__":
    main()
