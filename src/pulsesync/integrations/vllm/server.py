"""A client of a vLLM server, with which `pulse follow RUN --vllm URL` reads its status and updates it.

    server = VllmServer("http://127.0.0.1:8000")
    report = server.update("s3://bucket/run", 12)

With the routes of `Routes` an update is one request. On a server with vLLM's development routes the same steps are
taken one by one; if this process is killed meanwhile, such a server can be left paused. This module does not import
vLLM.
"""

import json
import secrets
import time
from pathlib import Path
from typing import Any

from pulsesync.errors import PulseError
from pulsesync.integrations.engine.answers import RANK_REPORT, RANK_STATUS, STATUS, Fields, check_fields, check_ranks
from pulsesync.integrations.engine.server import STATUS_TIMEOUT_S, EngineServer
from pulsesync.integrations.engine.update import Ask, Finish, Step, UpdateReport, Wait, merged_status, moving, run

_ANSWERS: dict[str, Fields] = {"find": {"version": (int,)}, "commit": RANK_REPORT}  # to others: the rank's status
START_WITH = "--middleware pulsesync.integrations.vllm.Routes"


class VllmServer(EngineServer):
    """A vLLM server that is updated to versions of a run.

    Args:
        url: Its address, such as http://127.0.0.1:8000.
        api_key: The key that it was started with, if any.
        timeout_s: How long an update may take.
        api_key_in_clear: Send the key over http to another machine, too, although it can be read on the network.

    Raises:
        ValueError: as for `EngineServer`.
    """

    engine = "vLLM"
    key_hint = "pass it with --api-key, PULSE_VLLM_API_KEY or VllmServer(api_key=)"

    _by_routes: bool | None = None  # whether it has our routes; None: not known yet
    _paused_at, _pause_s = 0.0, 0.0  # when an update has paused it (0 if not), and how long in all

    def status(self) -> dict[str, Any]:
        """Return the server's status, as `EngineServer.status`, and weight_version and paused. Raises: as there."""
        if self._by_routes is not False:
            code, answer = self._call("GET", "/v1/pulse", STATUS_TIMEOUT_S)
            if code == 200:
                self._by_routes = True
                with self._named_in_errors():
                    return check_fields(answer, STATUS)
            if code != 404:
                raise self._refusal(code, answer)
            self._by_routes = False
        code, paused = self._call("GET", "/is_paused", STATUS_TIMEOUT_S)
        if code == 404:
            self._by_routes = None
            raise PulseError(
                f"the server at {self.url} cannot be updated: start it with `vllm serve MODEL {START_WITH}`, in an "
                "environment where pulsesync is installed"
            )
        return {**merged_status(self._ask({"do": "status"})), "paused": paused.get("is_paused")}

    def _update(self, options: dict[str, Any], version: int | str, kv_cache: str) -> UpdateReport:
        if self._by_routes is None:
            self.status()
        if not self._by_routes:
            steps = moving(options, version, secrets.token_hex(8))
            report = run(steps, lambda step: self._take(step, kv_cache))
            with self._named_in_errors():
                return UpdateReport.parse({**report, "pause_s": self._pause_s})
        body = {**options, "version": version, "kv_cache": kv_cache}
        code, answer = self._call("POST", "/v1/pulse/update", self._timeout_s, body)
        if isinstance(answer.get("error"), dict) and "type" in answer["error"]:  # vLLM's own has others, too
            self._raise_error(answer)
        if code != 200:
            raise self._refusal(code, answer)
        with self._named_in_errors():
            return UpdateReport.parse(answer)

    def load_adapter(self, name: str, folder: Path) -> None:
        """Load a LoRA adapter from a folder, in place of the one of this name. Raises: PulseError, StoreError."""
        body = {"lora_name": name, "lora_path": str(folder), "load_inplace": True}
        code, answer = self._call("POST", "/v1/load_lora_adapter", self._timeout_s, body)
        if code == 404:
            raise PulseError(
                f"the server at {self.url} cannot load adapters while it runs: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        if code != 200:
            raise self._refusal(code, answer, "/v1/load_lora_adapter")

    def _take(self, step: Step, kv_cache: str) -> Any:
        """Take a step of an update with vLLM's development routes."""
        if isinstance(step, Ask):
            return self._ask(step.message)
        if isinstance(step, Wait):
            time.sleep(step.seconds)
        elif isinstance(step, Finish):
            if kv_cache == "drop":
                self._step("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            body = {"new_version": str(step.version)}
            code, answer = self._call("POST", "/update_weight_version", STATUS_TIMEOUT_S, body)
            if code not in (200, 404):  # vLLM before 0.27 has no such route
                raise self._refusal(code, answer)
        elif step == "pause":
            self._paused_at = time.perf_counter()
            self._step("/pause?mode=keep&clear_cache=false")
        elif self._paused_at:  # otherwise the update has failed before it paused the server
            self._step("/resume")
            self._pause_s, self._paused_at = time.perf_counter() - self._paused_at, 0.0
        return None

    def _ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"method": "pulse_call", "args": [json.dumps(message)]}
        answer = self._step("/collective_rpc", body)
        with self._named_in_errors():
            return check_ranks(answer.get("results"), _ANSWERS.get(message["do"], RANK_STATUS))

    def _forget(self) -> None:
        self._by_routes = None
