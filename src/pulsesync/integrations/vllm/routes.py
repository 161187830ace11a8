"""Routes of a vLLM server with which it is updated to versions, without its development routes.

    vllm serve MODEL --middleware pulsesync.integrations.vllm.Routes

    GET  /v1/pulse           the run, the version, its digest, and whether generation is paused
    POST /v1/pulse/update    {"location": "s3://bucket/run", "version": 12, "trust": ["…"], "kv_cache": "drop"}

An update is prepared while the server generates; then it pauses, writes on all ranks, sets the engine's weight_version
and resumes. The routes are under /v1, so a server with --api-key requires the key for them, too.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Coroutine, Generator
from typing import Any, Literal, get_args

from pulsesync.core.arguments import one_of
from pulsesync.errors import PulseError
from pulsesync.integrations.engine import update as updates
from pulsesync.integrations.engine.follower import EngineLimits, RunOptions, find_version
from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.plugin import read_limits

logger = logging.getLogger(__name__)
PATH = "/v1/pulse"
KvCache = Literal["drop", "keep"]


class Routes:
    """ASGI middleware that adds the routes to vLLM's application, at the first request.

    As routes of the application they are behind its own middleware, such as the one that checks the API key.

    Args:
        app: The application that this wraps.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._limits = read_limits()  # a server whose limits cannot be read does not start
        self._added = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._added:
            self._added = True
            add_routes(scope["app"], self._limits)
        await self._app(scope, receive, send)


def add_routes(app: Any, limits: EngineLimits) -> None:
    """Add the routes to a Starlette application whose `state.engine_client` is the engine."""
    from starlette.responses import JSONResponse

    served: list[ServedEngine] = []  # one element, created when the engine exists

    def engine(request: Any) -> ServedEngine:
        if not served:
            served.append(ServedEngine(request.app.state.engine_client, limits))
        return served[0]

    async def status(request: Any) -> Any:
        return await _answered(engine(request).status())

    async def update(request: Any) -> Any:
        try:
            asked = parse_update(await request.json())
        except ValueError as e:
            return JSONResponse({"error": {"type": "ValueError", "message": str(e)}}, 400)
        # A task of its own: an update that has begun is completed, whether or not the client waits for it.
        return await asyncio.shield(asyncio.create_task(_answered(engine(request).update(*asked))))

    async def _answered(doing: Coroutine[Any, Any, dict[str, Any]]) -> Any:
        try:
            return JSONResponse(await doing)
        except Exception as e:  # the client gets it as an answer
            if not isinstance(e, PulseError):
                logger.exception("An update failed.")
            return JSONResponse({"error": {"type": type(e).__name__, "message": str(e)}}, 500)

    app.add_route(PATH, status, methods=["GET"])
    app.add_route(f"{PATH}/update", update, methods=["POST"])
    guarded = any("Authentication" in str(layer.cls) for layer in app.user_middleware)
    if not guarded and not (limits.runs and limits.trust):
        logger.warning(
            "Any client that reaches this port can change the served weights. Start the server with --api-key, or set "
            "PULSE_VLLM_RUNS and PULSE_VLLM_TRUST to limit which runs it accepts."
        )


def parse_update(body: Any) -> tuple[dict[str, Any], int | str, KvCache]:
    """Return the run, the version and the KV-cache option of a request's body. Raises: ValueError."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    options = {**body}
    version, kv_cache = options.pop("version", updates.LATEST), options.pop("kv_cache", "drop")
    updates.check_version(version)
    one_of("kv_cache", kv_cache, get_args(KvCache))
    RunOptions.parse(options)
    return options, version, kv_cache


class ServedEngine:
    """The engine of a server, updated by the process that serves; one update at a time."""

    def __init__(self, engine: Any, limits: EngineLimits | None = None) -> None:
        self._engine, self._limits = engine, limits or EngineLimits()
        self._turns = asyncio.Lock()
        self._kv_cache: KvCache = "drop"
        self._paused_here = False  # whether an update has paused the engine and not resumed it
        self._paused_at, self._pause_s = 0.0, 0.0

    async def status(self) -> dict[str, Any]:
        """Return the engine's status: that of rank 0, whether the others agree, and why an update left it paused."""
        return {
            **updates.merged_status(await self._ask({"do": "status"})),
            "weight_version": await compat.get_version(self._engine),
            "paused": await self._engine.is_paused(),
            "paused_by_update": self._paused_here,
        }

    async def update(self, options: dict[str, Any], version: int | str, kv_cache: KvCache) -> dict[str, Any]:
        """Update all ranks to a version; return the report. Raises: as `moving`."""
        asked = RunOptions.parse(options)
        self._limits.applied(asked)
        events = updates.UpdateEvents(str(asked.location))
        with events.noting_failure():
            if version == updates.LATEST:
                # not in a worker, which could not generate meanwhile
                version = await asyncio.to_thread(find_version, asked, self._limits)
            async with self._turns:
                await compat.check_awake(self._engine)
                self._kv_cache, self._pause_s = kv_cache, 0.0
                report = await self._run(updates.moving(options, version, secrets.token_hex(8)))
        report = {**report, "pause_s": self._pause_s, "kv_cache": kv_cache}
        events.updated(updates.UpdateReport.parse(report))
        return report

    async def _run(self, steps: Generator[updates.Step, Any, dict[str, Any]]) -> dict[str, Any]:
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._take(step)
                except Exception as e:  # noqa: BLE001 - the rule decides what becomes of it
                    step = steps.throw(e)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def _take(self, step: updates.Step) -> Any:
        engine = self._engine
        if isinstance(step, updates.Ask):
            return await self._ask(step.message)
        if isinstance(step, updates.Wait):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, updates.Finish):
            if self._kv_cache == "drop":
                await compat.drop_cache(engine)
            await compat.set_version(engine, str(step.version))
        elif step == "pause":
            await compat.check_awake(engine)
            self._paused_at = time.perf_counter()
            if not await engine.is_paused():  # if another caller has paused it, it stays paused
                self._paused_here = True
            await engine.pause_generation(mode="keep", clear_cache=False)
        elif self._paused_here:
            await engine.resume_generation()
            self._paused_here, self._pause_s = False, time.perf_counter() - self._paused_at
        return None

    async def _ask(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return await self._engine.collective_rpc("pulse_call", args=(json.dumps(message),))  # type: ignore[no-any-return]
