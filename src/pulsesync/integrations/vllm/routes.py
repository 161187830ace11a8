"""Routes of a vLLM server by which it is brought to versions, without its development routes.

    vllm serve MODEL --middleware pulsesync.integrations.vllm.Routes

    GET  /v1/pulse           the run, the version, its digest, and whether generation is paused
    POST /v1/pulse/update    {"location": "s3://bucket/run", "version": 12, "trust": ["…"], "kv_cache": "drop"}

An update pauses generation, brings all ranks to the version, sets the engine's weight_version and resumes. They are
under /v1, so a server with --api-key asks for the key here, too.
"""

import asyncio
import time
from typing import Any, Literal, get_args

from pulsesync.integrations.vllm import compat
from pulsesync.integrations.vllm.follower import LATEST, RunOptions, merged

PATH = "/v1/pulse"
KvCache = Literal["drop", "keep"]


class Routes:
    """ASGI middleware that adds the routes to vLLM's application, with the first request that comes.

    As routes of the application they are behind its own middleware, such as the one that checks the API key.
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
            body = await request.json()
            options, version, kv_cache = parse_update(body)
        except ValueError as e:
            return JSONResponse({"error": {"type": "ValueError", "message": str(e)}}, 400)
        async with turns:
            report = await update_engine(request.app.state.engine_client, options, version, kv_cache)
        return JSONResponse(report, 500 if "error" in report else 200)

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
    ranks = await engine.collective_rpc("pulse_status")
    agree = all((one["version"], one["digest"]) == (ranks[0]["version"], ranks[0]["digest"]) for one in ranks)
    return {
        **ranks[0],
        "ranks": len(ranks),
        "ranks_agree": agree,
        "weight_version": await compat.get_version(engine),
        "paused": await engine.is_paused(),
    }


async def update_engine(engine: Any, options: dict[str, Any], version: int | str, kv_cache: KvCache) -> dict[str, Any]:
    """Pause, bring all ranks to a version, name it, and resume; return the report, or {"error": …}.

    If it fails, the old weights are served on. If the weights are of no version, generation stays paused.
    """
    paused_before = await engine.is_paused()
    began = time.perf_counter()
    await compat.pause(engine)
    reports = await engine.collective_rpc("pulse_update", args=(options, version))
    failed = next((report for report in reports if "error" in report), None)
    broken = any(report.get("status", {}).get("broken") for report in reports)
    if failed is None:
        if kv_cache == "drop":
            await compat.drop_cache(engine)
        await compat.set_version(engine, str(reports[0]["version"]))
    if not (paused_before or broken):
        await engine.resume_generation()
    pause_s = time.perf_counter() - began
    if failed is not None:
        return {"error": _first_cause(reports)["error"], "paused": paused_before or broken, **failed["status"]}
    return {**merged(reports), "pause_s": pause_s, "kv_cache": kv_cache}


def _first_cause(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The error of the rank that failed, and not those of the ranks that only heard of it."""
    errors = [report for report in reports if "error" in report]
    return next((one for one in errors if one["error"]["type"] != "GroupError"), errors[0])
