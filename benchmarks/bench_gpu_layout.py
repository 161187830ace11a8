"""Does the layout of `context` suit a GPU? A trial on one card, made before the layout was settled.

    python benchmarks/bench_gpu_layout.py make blocks.npz --trace DIR --gguf FILE     # on a CPU, with numba
    python benchmarks/bench_gpu_layout.py run blocks.npz                              # on a GPU, with torch and Triton

`make` encodes 16 blocks (2^20 weights each) of the recorded run; `run` copies them until they fill a model of the size
asked for, finds the hot weights, decodes every block with one warp, checks every position and value, and times that,
the digest's recount and a plain copy. These are trial kernels: the GPU path itself is to come.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np

SHIFT, WIDTH = 7, 16  # BF16


def make(path: Path, trace: Path, gguf: Path | None, count: int = 16) -> None:
    """Encode the last count blocks of the recorded run's step 14 and keep all that `run` needs."""
    from recording import load

    from pulsesync.format import tables
    from pulsesync.kernels import cpu
    from pulsesync.model import BLOCK

    old_state, new_state = load(trace, gguf).state(14)
    names = [n for n, a in old_state.items() if a.size >= 1 << 18]
    old = np.concatenate([old_state[n].reshape(-1) for n in names])[-count * BLOCK :].copy()
    new = np.concatenate([new_state[n].reshape(-1) for n in names])[-count * BLOCK :].copy()
    none = np.empty(0, np.uint8)
    cut, blocks = 121, []
    contexts = tables.Contexts(cut - 24, 24, 1, tables.symbol_count(WIDTH))
    counts = contexts.empty()
    for i in range(count):
        o, n = (x[i * BLOCK : (i + 1) * BLOCK] for x in (old, new))
        positions, *bits = cpu.changed(o, n)
        hot = cpu.split(positions, bits[1], *cpu.steps(*bits, SHIFT)[:3], SHIFT, cut)
        decisions, _ = cpu.count_block(
            o, SHIFT, cut, contexts.rows, contexts.bits, none, 0, *hot[:3], counts, 0, hot[6], hot[7]
        )
        blocks.append((o, (hot[0], hot[2], hot[3]), decisions))
    frequencies = tables.normalise(counts.reshape(24, -1)[:, : contexts.symbols])
    cumulative, reciprocals = tables.cumulative(frequencies), tables.reciprocals(frequencies)
    lanes = [tables.lanes_for(b[2]) for b in blocks]
    streams = [
        cpu.encode_block(o, SHIFT, cut, contexts.rows, contexts.bits, none, 0, *hot, cumulative, reciprocals, d, n)
        for (o, hot, d), n in zip(blocks, lanes, strict=True)
    ]
    at = [b[1][0] for b in blocks]
    np.savez(
        path,
        old=old,
        cumulative=cumulative.reshape(24, -1),
        cut=cut,
        lanes=lanes,
        sizes=[s.size for s in streams],
        stream=np.concatenate(streams),
        changes=[p.size for p in at],
        positions=np.concatenate(at),
        new=np.concatenate([new[i * BLOCK + p.astype(np.int64)] for i, p in enumerate(at)]),
    )


def run(path: Path, billions: float) -> None:
    """Decode and recount on the GPU, check the results, print the times."""
    import torch
    import triton

    data = np.load(path)
    device = torch.device("cuda")
    blocks = len(data["lanes"])
    copies = max(1, round(billions * 1e9 / (blocks << 20)))
    from gpu_layout_kernels import decode, hot_count, hot_write, recount

    def signed(a):
        return torch.from_numpy(a.view(np.int16)).to(device)

    def running(sizes):
        return torch.from_numpy(np.concatenate([[0], np.cumsum(np.tile(sizes, copies))])).to(device)

    old = signed(data["old"]).repeat(copies).view(torch.uint16)
    stream = signed(data["stream"]).repeat(copies).view(torch.uint16)
    starts, out_starts = running(data["sizes"]), running(data["changes"])
    lanes = torch.from_numpy(np.tile(data["lanes"], copies).astype(np.int32)).to(device)
    table = torch.from_numpy(data["cumulative"].astype(np.int32)).to(device)
    changes, total, size = int(out_starts[-1]), blocks * copies, old.numel()
    chunk, cut = 2048, int(data["cut"]) << SHIFT
    chunks = size // chunk
    counts = torch.empty(chunks, dtype=torch.int32, device=device)
    offsets = torch.zeros(chunks + 1, dtype=torch.int64, device=device)

    def count_hot():
        hot_count[(chunks,)](old, counts, cut, CHUNK=chunk, num_warps=4)
        torch.cumsum(counts, 0, out=offsets[1:])

    count_hot()
    hot_total = int(offsets[-1])
    hot_bits = torch.empty(hot_total, dtype=torch.uint16, device=device)
    hot_at = torch.empty(hot_total, dtype=torch.int32, device=device)
    out_at = torch.full((changes,), -1, dtype=torch.int32, device=device)
    out_bits = torch.empty(changes, dtype=torch.uint16, device=device)
    ends = torch.empty(total, dtype=torch.int64, device=device)
    hot_starts = offsets[:: (1 << 20) // chunk].contiguous()

    def write_hot():
        hot_write[(chunks,)](old, offsets, cut, hot_bits, hot_at, CHUNK=chunk, num_warps=4)

    def decode_all():
        decode[(total,)](
            stream, starts, lanes, hot_starts, hot_bits, hot_at, table, out_starts, out_at, out_bits, ends,
            LO=int(data["cut"]) - 24, ROW=table.shape[1], P=14, num_warps=1,
        )  # fmt: skip

    keys_np = np.random.default_rng(0).integers(1, 1 << 32, (2, 4096), dtype=np.uint32)
    keys = torch.from_numpy(keys_np.view(np.int32)).to(device).view(torch.uint32)
    sums = torch.zeros(2, dtype=torch.int64, device=device)

    def recount_all(count=size // 4096, per=64, warps=8):
        sums.zero_()
        recount[(triton.cdiv(count, per),)](old, keys, sums, count, PER=per, num_warps=warps)

    write_hot()
    decode_all()
    torch.cuda.synchronize()
    want_at = torch.from_numpy(np.tile(data["positions"].view(np.int32), copies)).to(device)
    assert torch.equal(out_at, want_at), "positions differ"
    assert torch.equal(out_bits.view(torch.int16), signed(data["new"]).repeat(copies)), "values differ"
    assert torch.equal(ends, starts[1:] - starts[:-1]), "a stream did not end where it should"
    del want_at
    units = data["old"]
    recount_all(units.size // 4096)
    from pulsesync.kernels import reference

    expected = reference.digest_rectangle(units, 0, 1, units.size, units.size, keys_np)
    assert tuple(int(x) for x in sums.cpu().numpy().view(np.uint64)) == expected, "the digests differ"

    spare = torch.empty_like(old)

    def bench(f):
        return triton.testing.do_bench(f, warmup=50, rep=200, return_mode="median")

    rows = {"copy of the weights": bench(lambda: spare.copy_(old)), "find the hot weights: count": bench(count_hot)}
    rows["find the hot weights: write"] = bench(write_hot)
    rows["decode the blocks"] = bench(decode_all)
    for per, warps in ((16, 4), (64, 4), (16, 8), (64, 8), (256, 8), (64, 16)):
        rows[f"recount the digest ({per} chunks, {warps} warps)"] = bench(partial(recount_all, per=per, warps=warps))
    bandwidth = 4 * size / rows["copy of the weights"] / 1e9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(
        f"{size / 1e9:.2f} B weights in {total} blocks, {hot_total / size:.2%} hot, {changes / size:.3%} changed, "
        f"{hot_total / int(lanes.sum()):.0f} decisions a lane, copy at {bandwidth:.2f} TB/s"
    )
    for name, ms in rows.items():
        print(f"  {name:44s} {ms:8.3f} ms   {ms * 1e9 / size:6.3f} ps a weight")
    print(json.dumps({"weights": size, "hot": hot_total, "changed": changes, "copy_TBps": bandwidth, "ms": rows}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "run"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--billions", type=float, nargs="*", default=[0.13, 1.0, 7.6])
    given = parser.parse_args()
    if given.what == "make":
        make(given.path, given.trace, given.gguf)
    else:
        for billions in given.billions:
            run(given.path, billions)
