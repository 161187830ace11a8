"""`pulse follow`: keep a folder that other programs load from, or a server, at the newest version."""

import hashlib
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter

from pulsesync.cli import options
from pulsesync.cli.progress import show_progress
from pulsesync.core.environment import read_variable
from pulsesync.core.location import ParsedLocation, redacted
from pulsesync.core.progress import ProgressBars
from pulsesync.errors import NothingPublishedError, PulseError, StoreError
from pulsesync.integrations.folder import FolderUpdate, HuggingFaceFolder
from pulsesync.integrations.sglang import SglangServer
from pulsesync.integrations.vllm import ServerFollower, UpdateReport, VllmServer
from pulsesync.run.heartbeats import check_worker, name_worker
from pulsesync.run.pointers import is_about_pointer
from pulsesync.store.tokens import may_send_in_clear


# The signature is the command's options, and the docstring its help: both are as long as these are.
def follow(
    run: str,
    folder: Path | None = None,
    *,
    vllm: str | None = None,
    sglang: str | None = None,
    lora: str | None = None,
    kv_cache: Literal["drop", "keep"] = "drop",
    api_key: str | None = None,
    trust: options.Trust = None,
    trust_pointers: options.TrustPointers = None,
    cache: Path | None = None,
    once: options.Flag = False,
    interval_s: options.Interval = 1.0,
    hold_s: Annotated[options.Amount, Parameter(name="--hold")] = 10.0,
    version: options.Version = None,
    pointer: str | None = None,
    max_staleness: options.Version = None,
    follow_replaced: options.Flag = False,
    heartbeat: str | None = None,
    no_heartbeat: options.Flag = False,
    metrics: str | None = None,
    as_json: options.Json = False,
) -> int:
    """Keep a folder, a vLLM server or an SGLang server at the newest version of a run.

    FOLDER/current is always a complete, verified version. It is a link to one of two copies, a and b; the other is
    updated to the next version, and then the link is switched in one step. Resolve the link before you load:
    `from_pretrained(os.path.realpath("FOLDER/current"))`. The process may be killed at any moment; started again, it
    resumes from what is in the folder.

    With --vllm, a server that was started with `vllm serve MODEL --middleware pulsesync.integrations.vllm.Routes` is
    updated while it runs. It fetches and decodes a version while it generates, pauses to write it on all ranks or on
    none, and resumes. Requests in flight are kept. With --sglang, the same is done to a server that was started with
    `python -m sglang.launch_server --model-path MODEL --custom-weight-loader pulsesync.integrations.sglang.load`.

    While it follows, the command leaves a heartbeat in the run, or at the server that it reads the run from, so that
    pulse status shows this worker with its version and lag. A store that refuses to be written to is no problem: this
    is logged once.

    Args:
        run: The run to follow. A server must reach it at the same location.
        folder: Where the weights go: a folder that is empty, does not exist yet, or that pulse follow has written.
        vllm: Address of a vLLM server to update, such as http://127.0.0.1:8000: instead of a folder, or with --lora in
            addition to one.
        sglang: Address of an SGLang server to update, such as http://127.0.0.1:30000, instead of a folder.
        lora: With FOLDER and --vllm, for a run of a LoRA adapter: the name under which the server loads FOLDER/current
            whenever it has changed.
        kv_cache: What happens to the server's KV cache at an update: with drop, running requests compute theirs again
            with the new weights; with keep, they continue with what the old weights computed.
        api_key: The key that the server was started with, if any; PULSE_VLLM_API_KEY or PULSE_SGLANG_API_KEY in the
            environment if not given.
        trust: Public key of a publisher to trust, or a file of such keys; nothing else is then accepted.
        trust_pointers: Public key that may move pointers and nothing else, or a file of such keys; it needs --trust.
        cache: Folder in which fetched bytes are kept, shared with other processes; FOLDER/.cache if not given.
        once: Update to the newest version and end; exit code 3 if there is none yet.
        interval_s: Seconds between checks for a new version.
        hold_s: Seconds for which a copy that is no longer current is not changed: time to finish loading it.
        version: Update to this version, which may be an older one, and end.
        pointer: Follow this pointer of the run, such as stable, instead of the newest version: pulse point moves it,
            forwards and backwards.
        max_staleness: End with exit code 1 if the folder cannot be updated and is more than this number of versions
            away from the version to follow, so that nothing is loaded from it unnoticed.
        follow_replaced: If the run was replaced by another one or restored from a backup since the folder was written,
            start over from what is there now; without this, that is an error.
        heartbeat: Name under which pulse status shows this worker; if not given, one made of the host and FOLDER, or of
            the host and the server.
        no_heartbeat: Do not let pulse status show this worker, and write nothing to the run.
        metrics: Export metrics for Prometheus at this port of 127.0.0.1, or at a host and port such as 0.0.0.0:9464.
        as_json: Print one JSON object for every version, for machines.

    Raises:
        UsageError: --pointer is not a valid name, or not exactly one of FOLDER, --vllm and --sglang is given.
        NothingThereError: with --once or --version, no version can be synced.
        PulseError: the folder or the server cannot be updated.
    """
    _check_target(folder, vllm, sglang, lora, cache)
    worker = _read_heartbeat(heartbeat, no_heartbeat, folder, vllm, sglang)
    store, printer = options.open_place(run), options.Printer(as_json)
    keys, movers = options.read_keys(trust, trust_pointers)
    options.export_metrics(metrics)
    server, goal = _open_server(vllm, sglang, api_key), _Goal(once or version is not None, version, interval_s)
    shared: dict[str, Any] = {
        "trust": keys,
        "trust_pointers": movers,
        "max_staleness": max_staleness,
        "follow_replaced": follow_replaced,
        "heartbeat": worker,
    }
    try:
        if folder is None:
            assert server is not None
            # another process of this host opens it, whatever its working folder is
            place = str(ParsedLocation.parse(run).resolved())
            follower = ServerFollower(server, place, store, kv_cache=kv_cache, pointer=pointer, **shared)
        else:
            kept = HuggingFaceFolder(store, folder, cache=cache, hold_s=hold_s, follow=pointer, **shared)
    except ValueError as e:
        raise options.UsageError(f"--pointer {pointer}: {e}") from e
    if folder is None:
        with closing(follower), show_progress(as_json) as bars:
            _follow_server(follower, printer, bars, goal)
    else:
        adapter = (server, lora) if lora is not None and isinstance(server, VllmServer) else None
        with kept, show_progress(as_json):
            _FollowedFolder(kept, run, printer, adapter).follow(goal)
    return 0


class _Goal(NamedTuple):
    """Which version to update to, and whether to go on after it."""

    once: bool
    version: int | None
    interval_s: float


def _check_target(
    folder: Path | None, vllm: str | None, sglang: str | None, lora: str | None, cache: Path | None
) -> None:
    """Raises: UsageError, if it is not clear what to update."""
    if lora is not None and (folder is None or vllm is None):
        raise options.UsageError(
            "--lora needs both a folder, for the adapter, and --vllm, for the server that loads it"
        )
    if sum(given is not None for given in (folder, vllm, sglang)) != (1 if lora is None else 2):
        raise options.UsageError(
            "give exactly one of: a folder, --vllm with a server's address, --sglang with a server's address"
        )
    if folder is None and cache is not None:
        variable = "PULSE_VLLM_CACHE" if vllm is not None else "PULSE_SGLANG_CACHE"
        raise options.UsageError(f"--cache applies to a folder only; for a server, set {variable} in its environment")


def _read_heartbeat(
    heartbeat: str | None, no_heartbeat: bool, folder: Path | None, vllm: str | None, sglang: str | None
) -> str | None:
    if heartbeat is not None and no_heartbeat:
        raise options.UsageError("--heartbeat contradicts --no-heartbeat; give one of the two")
    try:
        return None if no_heartbeat else check_worker(heartbeat or _name_worker(folder, vllm, sglang))
    except ValueError as e:
        raise options.UsageError(f"--heartbeat: {e}") from e


def _open_server(vllm: str | None, sglang: str | None, api_key: str | None) -> VllmServer | SglangServer | None:
    try:
        in_clear = may_send_in_clear()
        if vllm is not None:
            key = api_key or read_variable("PULSE_VLLM_API_KEY")
            return VllmServer(vllm, api_key=key, api_key_in_clear=in_clear)
        if sglang is not None:
            key = api_key or read_variable("PULSE_SGLANG_API_KEY")
            return SglangServer(sglang, api_key=key, api_key_in_clear=in_clear)
    except ValueError as e:
        raise options.UsageError(str(e)) from e
    return None


def _name_worker(folder: Path | None, vllm: str | None, sglang: str | None) -> str:
    """A name for this worker: two folders of a host with the same last name have different ones."""
    if folder is not None:
        place = folder.resolve()
        return name_worker(place.name[:24], hashlib.sha256(str(place).encode()).hexdigest()[:6])
    kind, url = ("vllm", vllm) if vllm is not None else ("sglang", sglang)
    return name_worker(kind, redacted(url or "").partition("://")[2].rpartition("@")[2])


def _follow_server(follower: ServerFollower, printer: options.Printer, bars: ProgressBars, goal: _Goal) -> None:
    url = follower.server.url
    if goal.once:
        try:
            bars.report(0, None, f"updating {url}")
            report = follower.update(goal.version)
        except NothingPublishedError as e:
            raise options.NothingThereError(str(e)) from e
        if report is not None:
            _report_update(report, url, printer)
        else:
            status = follower.server.status()
            printer.tell("holds", f"{url} serves version {status['version']} already", version=status["version"])
        return
    printer.note("follows", f"{url} follows {follower.location}", server=url, run=follower.location)
    for report in follower.follow(goal.interval_s, lambda e: _report_failure(e, follower, printer)):
        _report_update(report, url, printer)


def _way(path: Sequence[str]) -> str:
    """Say in words what a sync applied, as "1 anchor+3 patch"."""
    return "+".join(f"{path.count(kind)} {kind}" for kind in dict.fromkeys(path)) or "nothing"


def _report_update(report: UpdateReport, url: str, printer: options.Printer) -> None:
    printer.tell(
        "version",
        f"{url} serves version {report.version} (step {report.step}): {_way(report.path)}, "
        f"{options.size(report.fetched_bytes)}, paused {report.pause_s:.2f} s, {report.mode}, "
        f"digest {report.digest[:12]}",
        **asdict(report),
        server=url,
    )


def _report_failure(error: PulseError, follower: ServerFollower, printer: options.Printer) -> None:
    if isinstance(error, NothingPublishedError):
        printer.note("waits", f"waiting for the first version: {error}", run=follower.location)
    else:
        printer.retries(error)


@dataclass(frozen=True)
class _FollowedFolder:
    """Keeps a folder at the versions of a run, prints what happens, and has a server load the folder as an adapter."""

    kept: HuggingFaceFolder
    run: str
    printer: options.Printer
    adapter: tuple[VllmServer, str] | None  # the server, and the adapter's name there

    def follow(self, goal: _Goal) -> None:
        if goal.once:
            self._update(goal.version)
            return
        kept, printer = self.kept, self.printer
        if current := kept.current:
            text = f"{kept.folder}/current is version {current.version}; following {self.run}"
            printer.note("holds", text, **asdict(current))
            self._load_adapter(current.version)
        else:
            text = f"there is no version in {kept.folder} yet; following {self.run}"
            printer.note("waits", text, folder=str(kept.folder))
        missing: tuple[str, ...] = ()
        for flip in kept.follow(goal.interval_s, self._report_error):
            self._report(flip)
            if flip.missing != missing:
                self._report_missing(flip)
            missing = flip.missing
            self._load_adapter(flip.mark.version)

    def _update(self, version: int | None) -> None:
        try:
            flip = self.kept.update(version)
        except NothingPublishedError as e:
            raise options.NothingThereError(str(e) if is_about_pointer(e) else options.unreachable(self.run)) from e
        if flip is not None:
            self._report(flip)
            self._report_missing(flip)
        if (current := self.kept.current) is None:
            return
        if self.adapter is not None:
            self._load_adapter(current.version)
        elif flip is None:
            text = f"{self.kept.folder}/current is version {current.version} already"
            self.printer.tell("holds", text, **asdict(current))

    def _load_adapter(self, version: int) -> None:
        """Have the server load the folder as soon as the server answers, if there is one."""
        if self.adapter is None:
            return
        server, name = self.adapter
        for wait_s in (1, 2, 4, 8, 16, 32, 60, 0):
            try:
                server.load_adapter(name, (self.kept.folder / "current").resolve())
                break
            except StoreError as e:
                if not wait_s:
                    raise
                self.printer.retries(e)
                time.sleep(wait_s)
        self.printer.tell("adapter", f"{server.url} serves version {version} as {name}", version=version, lora=name)

    def _report(self, flip: FolderUpdate) -> None:
        sync, mark = flip.sync, flip.mark
        back = ""
        if sync.went_back:
            is_below = sync.step < (sync.from_step or 0)
            back = f", back from step {sync.from_step}" if is_below else f"; it went back at version {sync.rewound_at}"
        if flip.left_out:
            text = f"not written, because no loader reads them: {', '.join(flip.left_out)}"
            self.printer.note("left-out", text)
        self.printer.tell(
            "version",
            f"version {mark.version} (step {mark.step}{back}) is current, in {flip.folder.name}: {_way(sync.path)}, "
            f"{options.size(sync.fetched_bytes)}, {flip.seconds:.1f} s, digest {mark.digest[:12]}",
            **asdict(mark),
            folder=str(flip.folder),
            from_version=sync.from_version,
            from_step=sync.from_step,
            rewound_at=sync.rewound_at,
            began=flip.began,
            path=list(sync.path),
            changed=sync.changed,
            fetched_bytes=sync.fetched_bytes,
            seconds=round(flip.seconds, 3),
            left_out=list(flip.left_out),
            missing=list(flip.missing),
        )

    def _report_missing(self, flip: FolderUpdate) -> None:
        """Warn that `from_pretrained` will fail. The trainer must publish the missing files with a version."""
        if flip.missing:
            current = f"{self.kept.folder}/current"
            self.printer.note(
                "missing",
                f"{current} cannot be loaded as a Hugging Face model: the run has no {', no '.join(flip.missing)}. "
                'Publish a model that has a .config, or give the files to Publisher(files={"config.json": …})',
                files=list(flip.missing),
                folder=current,
            )

    def _report_error(self, error: PulseError) -> None:
        if not isinstance(error, NothingPublishedError):
            self.printer.retries(error)
            return
        if is_about_pointer(error):
            text = f"waiting for the pointer: {error}"
        elif error.version is not None:
            text = (
                f"waiting for the first anchor of version {error.version} at {self.run}, which is probably still being "
                "written"
            )
        elif (current := self.kept.current) is not None:
            text = (
                f"there is no version at {self.run} any more; {self.kept.folder}/current stays version "
                f"{current.version}, and pulse follow waits for the next one"
            )
        else:
            text = f"waiting for the first version: there is none at {self.run} yet; is this the right location?"
        self.printer.note("waits", text, run=self.run)
