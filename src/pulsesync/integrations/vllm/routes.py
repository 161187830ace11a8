"""Routes of a vLLM server by which it is brought to versions, without its development routes.

    vllm serve MODEL --middleware pulsesync.integrations.vllm.Routes

    GET  /v1/pulse           the run, the version, its digest, and whether generation is paused
    POST /v1/pulse/update    {"location": "s3://bucket/run", "version": 12, "trust": ["…"], "kv_cache": "drop"}

An update is prepared while the server generates; then it pauses, writes on all ranks, sets the engine's weight_version
and resumes. The routes are under /v1, so a server with --api-key asks for the key here, too.
"""

import asyncio
import json
import time
from typing import Any, Literal, get_args

from pulsesync.errors import PulseError
from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.follower import LATEST, RunOptions
from pulsesync.integrations.vllm.update import Ask, Finish, Step, Wait, moving

PATH = "/v1/pulse"
KvCache = Literal["drop", "keep"]


class Routes:
    """ASGI middleware that adds the routes to vLLM's application, with the first request that comes.

    As routes of the application they are behind its own middleware, such as the one that checks the API key.

    Args:
        app: The application that this is put in front of.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._added = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not self._added:
            self._added = True
            add_routes(scope["app"])
        await self._app(scope, receive, send)


def add_routes(app: Any) -> None:
    """Add the routes to a Starlette application whose `state.engine_client` is the engine."""
    from starlette.responses import JSONResponse

    turns = asyncio.Lock()  # one update at a time

    async def status(request: Any) -> Any:
        return JSONResponse(await read_status(request.app.state.engine_client))

    async def update(request: Any) -> Any:
        try:
            options, version, kv_cache = parse_update(await request.json())
        except ValueError as e:
            return JSONResponse({"error": {"type": "ValueError", "message": str(e)}}, 400)
        try:
            async with turns:
                report = await ServedEngine(request.app.state.engine_client, kv_cache).update(options, version)
        except PulseError as e:
            return JSONResponse({"error": {"type": type(e).__name__, "message": str(e)}}, 500)
        return JSONResponse(report)

    app.add_route(PATH, status, methods=["GET"])
    app.add_route(f"{PATH}/update", update, methods=["POST"])


def parse_update(body: Any) -> tuple[dict[str, Any], int | str, KvCache]:
    """The run, the version and what becomes of the KV cache, of the body of a request. Raises: ValueError."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    options = {**body}
    version, kv_cache = options.pop("version", LATEST), options.pop("kv_cache", "drop")
    if version != LATEST and (not isinstance(version, int) or isinstance(version, bool) or version < 0):
        raise ValueError(f"version must be a number or {LATEST!r}; got {version!r}")
    if kv_cache not in get_args(KvCache):
        raise ValueError(f"kv_cache must be one of {', '.join(map(repr, get_args(KvCache)))}; got {kv_cache!r}")
    RunOptions.parse(options)
    return options, version, kv_cache


async def read_status(engine: Any) -> dict[str, Any]:
    """Where the engine is: what rank 0 says, and whether the others are at the same version."""
    ranks = await engine.collective_rpc("pulse_call", args=(json.dumps({"do": "status"}),))
    agree = all((one["version"], one["digest"]) == (ranks[0]["version"], ranks[0]["digest"]) for one in ranks)
    return {
        **ranks[0],
        "ranks": len(ranks),
        "ranks_agree": agree,
        "weight_version": await compat.get_version(engine),
        "paused": await engine.is_paused(),
    }


class ServedEngine:
    """The engine of a server, brought to versions by the process that serves."""

    def __init__(self, engine: Any, kv_cache: KvCache) -> None:
        self._engine, self._kv_cache = engine, kv_cache
        self._was_paused = False
        self._paused_at, self._pause_s = 0.0, 0.0

    async def update(self, options: dict[str, Any], version: int | str) -> dict[str, Any]:
        """Bring all ranks to a version; return the report. Raises: as `moving`."""
        steps = moving(options, version)
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
            return {**end.value, "pause_s": self._pause_s, "kv_cache": self._kv_cache}

    async def _take(self, step: Step) -> Any:
        engine = self._engine
        if isinstance(step, Ask):
            return await engine.collective_rpc("pulse_call", args=(json.dumps(step.message),))
        if isinstance(step, Wait):
            await asyncio.sleep(step.seconds)
        elif isinstance(step, Finish):
            if self._kv_cache == "drop":
                await compat.drop_cache(engine)
            await compat.set_version(engine, str(step.version))
        elif step == "pause":
            self._was_paused = await engine.is_paused()
            self._paused_at = time.perf_counter()
            await compat.pause(engine)
        else:
            if not self._was_paused:
                await engine.resume_generation()
            self._pause_s = time.perf_counter() - self._paused_at
        return None
