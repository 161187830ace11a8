"""`pulse doctor`: check a machine and a location, and say what was found and what to do."""

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from pulsesync.cli.options import Flag, Json, Trust, UsageError, open_place, read_trust, size
from pulsesync.cli.progress import hide, show_progress
from pulsesync.core import headroom
from pulsesync.core.text import one_line
from pulsesync.core.version import __version__
from pulsesync.errors import PulseError
from pulsesync.maintain.doctor import Finding, check_location
from pulsesync.store.base import is_local

# What people install by name; the others are for developers of the package.
EXTRAS = ("torch", "serve", "metrics", "otel", "ray", "vllm", "sglang", "hf", "delta", "jax", "keras")
NEEDED = ("numpy", "zstandard")
# What a plain installation has as well, and a small one may leave out; and what needs it.
LEFT_OUT = {
    "numba": "fast kernels",
    "ml-dtypes": "BF16 and FP8 in numpy arrays",
    "obstore": "s3://, gs:// and az://",
    "cryptography": "signatures",
}
_EXTRA = re.compile(r"""([A-Za-z0-9._-]+).*;.*extra == ["']([\w-]+)["']""")  # a requirement, and whose it is
LITTLE_MEMORY, LITTLE_DISK = 2 << 30, 4 << 30
MODEL_WEIGHTS, CHANGED = 1 << 21, 0.01  # of the update on which `auto` is tried
TRIED_VERSIONS = 5  # two epochs of two, and what is measured in the first decides the second


def doctor(location: str | None = None, *, read_only: Flag = False, trust: Trust = None, as_json: Json = False) -> int:
    """Check this machine and, if it is given, a location, and say for each check what was found and what to do.

    Of the machine: versions of Python and packages, which extras are installed, whether compiled kernels are cached,
    torch, GPU and Triton, memory and temporary disk space. Of the location: credentials, reading, writing, listing,
    that an object which exists is never overwritten by create (which keeps two trainers apart), also if several
    processes try at once, ranges, clocks, the speed of the link and what codec=auto makes of it, and the run.

        pulse doctor                            this machine alone

        pulse doctor s3://bucket/run            before a trainer publishes there

        pulse doctor s3://bucket/run --read-only    with the credentials of a worker: nothing is written

    Without --read-only a few MB are written below LOCATION/doctor/ and removed again. Each line begins with `ok`,
    `warn`, `fail` or `skipped`. The exit code is 1 if a check fails, else 0. Secrets are never printed.

    Args:
        location: The location of a run, or where one is to be.
        read_only: Write nothing, and do not expect that writing is allowed. The address of a server is always checked
            in this way.
        trust: Public key of a publisher to trust, or a file of such keys.
        as_json: Print one JSON object a check, and a summary, for machines.

    Raises:
        UsageError: --trust is not a key, or --read-only is given without a location.
    """
    keys = read_trust(trust)
    if location is None and (read_only or keys is not None):
        raise UsageError("--read-only and --trust apply to a location, and none is given")
    counts = dict.fromkeys(("ok", "warn", "fail", "skipped"), 0)
    with show_progress(as_json) as bars:
        for finding in _findings(location, read_only, keys):
            hide()
            _print(finding, as_json)
            counts[finding.status] += 1
            bars.report(sum(counts.values()), None, "checking")
    if as_json:
        print(json.dumps({"event": "summary", "healthy": not counts["fail"], **counts}))
    else:
        print(", ".join(f"{count} {status}" for status, count in counts.items() if count))
    return 1 if counts["fail"] else 0


def _findings(location: str | None, read_only: bool, trust: frozenset[str] | None) -> Iterator[Finding]:
    for check in (_python, _packages, _extras, _kernels, _torch, _gpu, _triton, _memory, _disk):
        yield _guarded(check)
    if location is None:
        return
    try:
        store = open_place(location)
    except (PulseError, ImportError) as e:
        yield Finding("location", "fail", str(e), None)
        return
    link: float | None = None
    for finding in check_location(store, read_only=read_only, trust=trust):
        if finding.check == "link" and finding.figures:
            link = min(finding.figures.values())
        yield finding
    if link is None:
        return
    if is_local(store):
        advice = "pass link= to Publisher, in bits a second, if workers are on other machines"
        yield Finding("codec", "skipped", "the store is on this machine, so the workers' link is not known", advice)
    else:
        yield _guarded(partial(_codec, 8 * link))


def _guarded(check: Callable[[], Finding]) -> Finding:
    """What a check finds; if it fails itself, that: a broken installation is what this command is for."""
    try:
        return check()
    except Exception as e:  # noqa: BLE001 - an import of a broken package can raise anything
        name = getattr(check, "__name__", "codec").strip("_")
        text = " ".join(f"{type(e).__name__}: {e}".split())
        return Finding(name, "fail", text, "reinstall the package that is named here")


def _print(finding: Finding, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"event": "check", **asdict(finding)}), flush=True)
        return
    print(f"{finding.status:8}{finding.check:18}{one_line(finding.found)}")
    if finding.advice is not None:
        print(f"{'':26}{one_line(finding.advice)}")
    sys.stdout.flush()


# This machine


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Finding("python", "ok", found)


def _packages() -> Finding:
    versions = {name: _version(name) for name in (*NEEDED, *LEFT_OUT)}
    missing = [name for name, version in versions.items() if version is None]
    if not set(NEEDED).isdisjoint(missing):
        return Finding("packages", "fail", f"{', '.join(missing)} missing", "pip install --upgrade pulsesync")
    installed = [f"{name} {version}" for name, version in versions.items() if version is not None]
    found = ", ".join([f"pulsesync {__version__}", *installed])
    if not missing:
        return Finding("packages", "ok", found)
    found += f"; not installed: {', '.join(f'{name} ({LEFT_OUT[name]})' for name in missing)}"
    return Finding("packages", "warn", found, f"if you need what they are for: pip install {' '.join(missing)}")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _extras() -> Finding:
    """Which extras are installed, by what the package's own metadata says they need."""
    try:
        found = [_EXTRA.match(text) for text in metadata.requires("pulsesync") or []]
    except metadata.PackageNotFoundError:
        return Finding("extras", "skipped", "pulsesync is not installed as a package, so its extras are not known")
    installed: list[str] = []
    absent: list[str] = []
    for extra in EXTRAS:
        ours = [one[1] for one in found if one is not None and one[2] == extra]
        (installed if ours and all(_version(name) for name in ours) else absent).append(extra)
    advice = f"if you need one: pip install 'pulsesync[{absent[0]}]'" if absent else None
    text = f"installed: {', '.join(installed) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    return Finding("extras", "ok", text, advice)


def _kernels() -> Finding:
    """Whether numba has compiled kernels of this version on disk, and can keep more."""
    if _version("numba") is None:
        slower = "numba is not installed: plain numpy gives the same weights, but a patch takes some 20 times as long"
        return Finding("kernels", "warn", slower, "pip install numba, where there is room for 213 MB more")
    from numba.core.dispatcher import Dispatcher

    from pulsesync.kernels import coder, cpu, jit, rounds

    if not jit.can_cache():
        anew = "numba finds no folder that it can write, so each process compiles the kernels anew, for some 20 s"
        return Finding("kernels", "warn", anew, "set NUMBA_CACHE_DIR to a folder that can be written")
    named = [one for module in (cpu, coder, rounds) for one in vars(module).values()]
    called = [getattr(one, "__wrapped__", None) for one in named]  # those that Python calls
    found: dict[int, Any] = {id(one): one for one in named + called if isinstance(one, Dispatcher)}  # some are twice
    caches = [one._cache for one in found.values() if one._cache.cache_path]  # the others are inside of these
    folder = Path(caches[0].cache_path)
    compiled = sum(bool(cache._cache_file._load_index()) for cache in caches)
    if compiled >= len(caches) // 2:  # not every kernel is needed by every run
        return Finding("kernels", "ok", f"{compiled} of {len(caches)} are compiled, in {folder}")
    few = f"{compiled} of {len(caches)} are compiled in {folder}: the first publish and the first sync wait some 20 s"
    ahead = 'compile them ahead, for instance when an image is built: python -c "import pulsesync; pulsesync.warm_up()"'
    return Finding("kernels", "warn", few, ahead)


def _torch() -> Finding:
    if (version := _version("torch")) is None:
        without = "not installed; numpy arrays and folders are published and synced without it"
        return Finding("torch", "skipped", without)
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Finding("torch", "ok", f"{version}, {built}")


def _gpu() -> Finding:
    if _version("torch") is None:
        return Finding("gpu", "skipped", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        if shutil.which("nvidia-smi") is None:
            return Finding("gpu", "skipped", "no CUDA device: weights stay in host memory")
        advice = "install torch for CUDA, and see whether nvidia-smi lists a device"
        return Finding("gpu", "warn", "nvidia-smi is installed, and torch finds no CUDA device", advice)
    devices = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        devices.append(f"{torch.cuda.get_device_name(number)}, {size(free)} of {size(total)} free")
    return Finding("gpu", "ok", "; ".join(devices))


def _triton() -> Finding:
    """Whether Triton is there for weights on a GPU, and has compiled something on this machine."""
    if _version("torch") is None:
        return Finding("triton", "skipped", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Finding("triton", "skipped", "no CUDA device")
    if (version := _version("triton")) is None:
        advice = "pip install triton; without it, weights on a GPU cannot be published or synced in place"
        return Finding("triton", "fail", "not installed", advice)
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    kept = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        advice = "set TRITON_CACHE_DIR to a folder that can be written"
        return Finding("triton", "warn", f"{version}; {folder} cannot be written", advice)
    if not kept:
        advice = "compile ahead: python -c \"import pulsesync; pulsesync.warm_up(device='cuda')\""
        return Finding("triton", "warn", f"{version}; {folder} is empty: the first versions wait some 10 s", advice)
    return Finding("triton", "ok", f"{version}; {kept} kernels in {folder}")


def _memory() -> Finding:
    rooms = headroom.find()
    if not rooms:
        return Finding("memory", "skipped", "this system does not report it")
    room = min(rooms)
    found = f"{size(room.available)} of {size(room.limit)} available"
    if room.available < LITTLE_MEMORY:
        advice = "a worker on the CPU needs its weights, about 1 byte a weight of history, and the largest patch"
        return Finding("memory", "warn", found, advice)
    return Finding("memory", "ok", found)


def _disk() -> Finding:
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"0")
        if free < LITTLE_DISK:
            advice = "loading an anchor may need as much as the weights there; set TMPDIR to a larger disk"
            return Finding("temporary disk", "warn", f"{size(free)} free in {folder}", advice)
        return Finding("temporary disk", "ok", f"{size(free)} free in {folder}")
    advice = "set TMPDIR to a folder that can be written"
    return Finding("temporary disk", "fail", f"{folder} cannot be written", advice)


# What the link means


def _codec(bits_per_s: float) -> Finding:
    """Let a real publisher choose how to code versions for a link of this speed, on an update made up for it."""
    if _version("ml-dtypes") is None:
        found = "not tried: ml-dtypes is not installed, in which the update would be made up"
        return Finding("codec", "skipped", found, "pip install ml-dtypes")
    import ml_dtypes
    import numpy as np

    from pulsesync.publish.publisher import Publisher
    from pulsesync.store.memory import MemoryStore

    class ShortEpochs(Publisher):
        _epoch_patches = 2  # the codec is chosen anew in each epoch

    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(0, 0.02, MODEL_WEIGHTS).astype(ml_dtypes.bfloat16)}
    bits = weights["w"].view(np.uint16)
    small = np.argsort(np.abs(weights["w"].astype(np.float32)))[: int(4 * CHANGED * MODEL_WEIGHTS)]
    reports = []
    with ShortEpochs(MemoryStore(), link=bits_per_s) as publisher:
        for step in range(TRIED_VERSIONS):
            reports.append(publisher.publish(weights, step=step))
            publisher.flush()
            bits[rng.choice(small, int(CHANGED * MODEL_WEIGHTS), replace=False)] += 1
    last = reports[-1]
    per_change = 8 * last.payload_bytes / max(last.changed, 1)
    return Finding(
        "codec",
        "ok",
        f"codec=auto would code versions as {last.codec}: {last.reason}. If 1 % of a billion weights change, a version "
        f"takes {1e7 * per_change / bits_per_s:,.2f} s on this link, at {per_change:.1f} bits a change",
        None,
        {"bits_per_change": per_change, "link_bits_per_s": bits_per_s},
    )
