"""SGLang follows a run: live parameters are updated in place, on all ranks or on none, and checked by digests.

    python -m sglang.launch_server --model-path MODEL --custom-weight-loader pulsesync.integrations.sglang.load
    pulse follow s3://bucket/run --sglang http://127.0.0.1:30000

SGLang calls `load` in every rank for `update_weights_from_tensor` with the `load_format` of this name. Its only tensor
is a request: JSON in bytes. The ranks fetch, check and write by themselves, step by step. SGLang finds `register` by
its entry point: without it, an error in `load` would end the server, and a server could not report its version.
"""

import base64
import json
import logging
import pickle
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from pulsesync.errors import GroupError, PulseError, StateError, StoreError, VerificationError
from pulsesync.group.collective import Team
from pulsesync.integrations.engine.adapter import (
    MOVES_EXPERTS,
    EngineAdapter,
    gloo_team,
    no_checkpoint,
    unknown_request,
)
from pulsesync.integrations.engine.answers import STATUS, check_fields
from pulsesync.integrations.engine.follower import EngineFollower, EngineLimits, RunOptions, find_version
from pulsesync.integrations.engine.server import STATUS_TIMEOUT_S, EngineServer
from pulsesync.integrations.engine.together import move_together
from pulsesync.integrations.engine.update import UpdateReport, check_version, merged_status
from pulsesync.integrations.runtime import EngineRank

__all__ = ["LOADER", "SglangServer", "load", "request"]

LOADER = "pulsesync.integrations.sglang.load"
"""The name of `load`, for `load_format`."""
PREFIX = "PULSE_SGLANG"  # of PULSE_SGLANG_RUNS, PULSE_SGLANG_TRUST and PULSE_SGLANG_CACHE: see EngineLimits
TENSOR = "pulsesync.request"
MOST_BYTES = 1 << 16  # the largest request
READY_S = 120.0  # how long an update is prepared while the server generates; after that the pause includes the rest
FIRST_POLL_S, MAX_POLL_S = 0.25, 2.0  # between two checks whether it is ready, each of which pauses the server shortly
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"

_MAX_RANKS = 1 << 14  # a request has a copy for each rank

logger = logging.getLogger(__name__)


# In a rank


def load(model: Any, named_tensors: Iterable[tuple[str, Any]]) -> None:
    """Execute a request on this rank, together with all others. SGLang calls this in every rank.

    Args:
        model: The model of this rank.
        named_tensors: What `request` returns.

    Raises:
        ValueError: this is not a request. PulseError: it failed, on every rank; the weights are unchanged. The one
            exception is a VerificationError with `torn`: the weights are no version, and the server must end.
    """
    rank = getattr(model, "pulse_rank", None)
    if rank is None:
        rank = model.pulse_rank = _Rank(SglangEngine(model))
    rank.answer = None
    rank.answer = rank.take(_read(named_tensors))


def request(message: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return a request to `load` as the named tensors that `update_weights_from_tensor` takes.

    Args:
        message: {"do": "update", "options": the fields of `RunOptions`, "version": a number or "latest"}.
    """
    import torch

    data = json.dumps({"token": secrets.token_hex(8), **message}).encode()
    return [(TENSOR, torch.frombuffer(bytearray(data), dtype=torch.uint8))]


def _read(named_tensors: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    tensors = dict(named_tensors)
    found = tensors.get(TENSOR)
    if len(tensors) != 1 or found is None or str(found.dtype) != "torch.uint8" or found.numel() > MOST_BYTES:
        raise ValueError(
            f"{LOADER} needs the one tensor that pulsesync.integrations.sglang.request returns; got "
            f"{sorted(tensors)[:3]}: publish weights to a run, and update the server with pulse follow --sglang"
        )
    message = json.loads(bytes(found.cpu().numpy()))
    if not isinstance(message, dict):
        raise ValueError("the request must be a JSON object")
    return message


class _Rank:
    """A rank of the engine: its follower, and the team of all ranks."""

    def __init__(self, engine: "SglangEngine") -> None:
        engine.check()  # before the ranks meet, which other kinds of parallelism could prevent
        self._follower = EngineFollower(engine, EngineLimits.read(PREFIX))
        self._team = engine.team()
        self.rank, self.size = self._team.rank, self._team.size
        self.answer: dict[str, Any] | None = None

    def take(self, message: dict[str, Any]) -> dict[str, Any]:
        do, token = message.get("do"), str(message.get("token", ""))
        if do == "update":
            return move_together(self._follower, self, message["options"], message["version"], token)
        if do not in ("prepare", "status"):
            raise unknown_request(do, "server")
        answers = self.gather(json.dumps(self._follower.call(message)).encode())
        return merged_status([json.loads(answer) for answer in answers])

    def gather(self, note: bytes) -> list[bytes]:
        """Gather notes as a team; if a rank is lost, it is not known whether it has written, so none may generate."""
        try:
            return self._team.gather(note)
        except GroupError as e:
            raise VerificationError(f"a rank was lost in an update: {e}; restart the server", torn=True) from e


class SglangEngine(EngineAdapter):
    """One rank of SGLang. Run with SGLang 0.5.23."""

    def check(self) -> None:
        parallel = _context("parallel")
        for name, flag in _REFUSED.items():
            if getattr(parallel, name) > 1:
                raise StateError(
                    f"this engine was started with {flag} {getattr(parallel, name)}, for which the positions of "
                    f"weights are not known: start a server without {flag} for each replica"
                )
        if _context("exec").moe.enable_eplb:
            raise StateError(MOVES_EXPERTS)

    def rank(self) -> EngineRank:
        parallel = _context("parallel")
        return EngineRank.sglang(parallel.tp_rank, parallel.tp_size, parallel.ep_size)

    def team(self) -> Team:
        """Return the ranks, in a process group of their own. Every rank must call this at the same time."""
        return gloo_team(_context("parallel").tp_size)

    def hf_config(self) -> Any:
        return self.model.config

    def is_quantised(self) -> bool:
        return getattr(self.model, "quant_config", None) is not None

    def checkpoint(self) -> Iterator[tuple[str, Any]]:
        model = _context("model")
        if model.load_format not in ("auto", "safetensors", "pt", "mistral"):
            raise no_checkpoint(model.load_format)
        loader = import_module("sglang.srt.model_loader.loader").DefaultModelLoader
        config = import_module("sglang.srt.configs.load_config").LoadConfig(load_format=model.load_format)
        yield from loader(config)._get_weights_iterator(loader.Source(model.model_path, model.revision))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str] | None:
        """Load with the model's own loader; begin_weight_update and end_weight_update unpack before and pack after."""
        return self.model.load_weights(weights)  # type: ignore[no-any-return]


_REFUSED = {"dp_size": "--dp-size", "attn_dp_size": "--enable-dp-attention", "pp_size": "--pp-size"}


def _context(name: str) -> Any:
    return getattr(import_module("sglang.srt.runtime_context"), f"get_{name}")()


# In every process of the server


def register() -> None:
    """Make SGLang report what `load` answers or raises. SGLang calls this by its entry point `pulse`."""
    registry = import_module("sglang.srt.plugins.hook_registry")
    registry.HookRegistry.register(UPDATER, report_answer, registry.HookType.AROUND)


def report_answer(
    original: Any, updater: Any, named_tensors: Any = None, load_format: str | None = None
) -> tuple[bool, str]:
    """Call SGLang's own method; if it is for `load`, return its answer or its error as JSON.

    An error would end SGLang's scheduler, and with it the server. That is right only if the weights are no version.
    """
    if load_format != LOADER:
        return original(updater, named_tensors=named_tensors, load_format=load_format)  # type: ignore[no-any-return]
    try:
        success, message = original(updater, named_tensors=named_tensors, load_format=load_format)
    except Exception as e:
        if getattr(e, "torn", False):
            raise
        logger.error("An update failed: %s.", e)
        return False, json.dumps({"error": {"type": type(e).__name__, "message": str(e)}})
    answer = getattr(updater.get_model(), "pulse_rank", None)
    return success, json.dumps(answer.answer) if success and answer is not None else message


# In the process that drives a server


class SglangServer(EngineServer):
    """An SGLang server that is updated to versions of a run.

    Generation is paused for each request to the ranks, and resumed after it, whether it succeeds or fails, and also if
    another program has paused the server. If this process is killed meanwhile, the server stays paused until this
    process is started again.

    Args:
        url: Its address, such as http://127.0.0.1:30000.
        api_key: The key that it was started with (--admin-api-key, or else --api-key), if any.
        timeout_s: How long an update may take.
        api_key_in_clear: Send the key over http to another machine, too, although it can be read on the network.

    Raises:
        ValueError: as for `EngineServer`.
    """

    engine = "SGLang"
    key_hint = "pass it with --api-key, PULSE_SGLANG_API_KEY or SglangServer(api_key=)"

    _ranks = 0  # 0 until the server was asked
    _known: dict[str, Any] | None = None  # its last status, valid while its weight_version is the same
    _pause_s = 0.0

    def status(self) -> dict[str, Any]:
        """Return the server's status, as `EngineServer.status`, and weight_version. Raises: as there.

        The ranks are asked, in a short pause, only if the server's weight_version has changed.
        """
        named = self._get("/model_info").get("weight_version")
        if self._known is None or self._known["weight_version"] != named:
            self._check_started()
            self._known = {**self._ask_status({"do": "status"}), "weight_version": named}
        version = self._known["version"]
        # It has weights of a version that it is not named after: the update that wrote them has not ended.
        return {**self._known, "paused_by_update": version is not None and named != str(version)}

    def _update(self, options: dict[str, Any], version: int | str, kv_cache: str) -> UpdateReport:
        check_version(version)
        goal = version if isinstance(version, int) else find_version(RunOptions.parse(options))
        if not self._ranks:
            self._check_started()
        self._known = None
        message = {"options": options, "version": goal, "token": secrets.token_hex(8)}
        paused_s = self._prepare(message)
        names = {"weight_version": str(goal), "flush_cache": kv_cache == "drop"}
        mode = "retract" if kv_cache == "drop" else "in_place"  # a cache can be dropped if no request uses it
        report = self._ask({**message, "do": "update"}, mode, **names)
        with self._named_in_errors():
            return UpdateReport.parse({**report, "pause_s": paused_s + self._pause_s})

    def _prepare(self, message: dict[str, Any]) -> float:
        """Let the ranks fetch, check and decode while the server generates; return how long it was paused."""
        began, wait_s, paused_s = time.monotonic(), FIRST_POLL_S, 0.0
        while True:
            status = self._ask_status({**message, "do": "prepare"})
            paused_s += self._pause_s
            if status["failure"]:
                self._raise_error({"error": status["failure"]})
            if status["update"] == "ready" or time.monotonic() - began > READY_S:
                return paused_s
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_POLL_S)

    def _ask_status(self, message: dict[str, Any]) -> dict[str, Any]:
        status = self._ask(message, "in_place")
        with self._named_in_errors():
            return check_fields(status, STATUS)

    def _ask(self, message: dict[str, Any], mode: str, **given: Any) -> dict[str, Any]:
        """Pause, send a request to the ranks, and resume; return their answer. Raises: PulseError."""
        paused_at = time.perf_counter()
        with self._afterwards("/continue_generation", {"torch_empty_cache": False}):
            self._step("/pause_generation", {"mode": mode})
            self._begin()
            with self._afterwards("/end_weight_update", {}):
                answer = self._send(message, given)
        self._pause_s = time.perf_counter() - paused_at
        return answer

    @contextmanager
    def _afterwards(self, path: str, body: dict[str, Any]) -> Iterator[None]:
        """Call a route after the block, even if the block raises; if both fail, the block's error notes that."""
        try:
            yield
        except BaseException as e:  # also if this process is interrupted
            try:
                self._step(path, body)
            except PulseError as also:
                e.add_note(
                    f"{path} failed, too, so the server may be paused: {also}; call that route, or restart the server"
                )
                logger.error("%s failed: %s. The server may be paused.", path, also)
            raise
        self._step(path, body)

    def _begin(self) -> None:
        body = {"selector": "target"}
        code, answer = self._call("POST", "/begin_weight_update", self._timeout_s, body)
        if code != 200 and "already open" in str(answer.get("message")):
            logger.warning("The server has an open weight update of a process that was killed; ending it.")
            self._step("/end_weight_update", {})
            self._step("/begin_weight_update", body)
        elif code != 200:
            raise self._refusal(code, answer, "/begin_weight_update")

    def _send(self, message: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        # A plain pickle: SGLang's own would refer to shared memory, which only a process of its host can open.
        payload = base64.b64encode(pickle.dumps(request(message))).decode()
        body = {
            "serialized_named_tensors": [payload] * self._ranks,
            "load_format": LOADER,
            "selector": "target",
            "flush_cache": False,
            **given,
        }
        code, answer = self._call("POST", "/update_weights_from_tensor", self._timeout_s, body)
        text = str(answer.get("message", ""))
        try:  # SGLang adds a sentence of its own after the JSON
            table = json.JSONDecoder().raw_decode(text)[0]
        except (ValueError, RecursionError):
            table = None
        self._raise_error(table)
        if code != 200:
            raise self._refusal(code, answer, "/update_weights_from_tensor")
        if not isinstance(table, dict):
            raise PulseError(
                f"the SGLang server at {self.url} does not report what its ranks did: install pulsesync in its "
                "environment, so that SGLang finds its entry point, and let SGLANG_PLUGINS, if it is set, name 'pulse'"
            )
        return table

    def _check_started(self) -> None:
        """Raises: PulseError, if the server was not started with our loader; a request would then end it."""
        info = self._get("/server_info")
        with self._named_in_errors():
            ranks = check_fields(info, {"tp_size": (int,)})["tp_size"]
            if not 0 < ranks <= _MAX_RANKS:
                raise StoreError(f"the answer is malformed: it says that there are {ranks} ranks", retryable=True)
        loaders = info.get("custom_weight_loader")
        if not isinstance(loaders, list) or LOADER not in loaders:
            raise PulseError(
                f"the server at {self.url} cannot be updated: start it with `python -m sglang.launch_server "
                f"--model-path MODEL --custom-weight-loader {LOADER}`, in an environment where pulsesync is installed"
            )
        self._ranks = ranks

    def _get(self, path: str) -> dict[str, Any]:
        code, answer = self._call("GET", path, STATUS_TIMEOUT_S)
        if code != 200:
            raise self._refusal(code, answer, path)
        return answer

    def _forget(self) -> None:
        self._ranks, self._known = 0, None
