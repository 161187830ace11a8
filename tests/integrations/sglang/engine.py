"""SGLang without its GPU: a server of its own routes, managers, weight updaters and models, which cannot generate.

    python -m tests.integrations.sglang.engine PORT RANKS MODEL

What is SGLang's own: the HTTP application, `TokenizerManager` (requests, pause, the locks of weight updates),
`SchedulerWeightUpdaterManager` and `WeightUpdater` in each rank, process groups, the model with its layers and weight
loaders, and the plugins. What is not: messages between the processes go through pipes, and the scheduler's loop takes
nothing but control requests, because its kernels do not run here.
"""

import asyncio
import json
import multiprocessing
import os
import socket
import sys
import threading
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integrations.sglang import absent

LOADER = "pulsesync.integrations.sglang.load"


def publish_arguments(ranks: int, model: str, rank: int | None = None, ep: int = 1) -> Any:
    """Set what SGLang's command line would set, in this process."""
    from sglang.srt.runtime_context import SpawnRanks, get_context, publish

    given: dict[str, Any] = {"tp_size": ranks, "model_path": model, "device": "cpu"}
    given |= {"load_format": "auto", "ep_size": ep, "custom_weight_loader": [LOADER]}
    arguments = get_context().override_server_args(**given).install()
    if rank is None:
        publish(arguments, role="tokenizer")
    else:
        publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank))
    return arguments


def import_sglang() -> None:
    """Import what ranks and the server use, before ranks are forked: it takes longer than all that they do."""
    absent.install()
    for name in (
        "distributed",
        "layers.dp_attention",
        "managers.scheduler_components.weight_updater",
        "managers.tp_worker",
        "model_executor.model_runner_components.weight_updater",
        "plugins",
        "runtime_context",
    ):
        import_module(f"sglang.srt.{name}")


# A rank


def start_groups(arguments: Any, rank: int, ranks: int, port: int) -> None:
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    address = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(
        world_size=ranks, rank=rank, local_rank=rank, distributed_init_method=address, backend="gloo"
    )
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(arguments)


def build_model(folder: str) -> Any:
    """SGLang's model of a checkpoint's architecture, with the weights of the checkpoint, by SGLang's own loaders."""
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    module = {"phi3": "llama"}.get(config.model_type, config.model_type)
    found = import_module(f"sglang.srt.models.{module}").EntryClass  # the registry would import every model
    kinds = found if isinstance(found, list) else [found]
    kind = next(kind for kind in kinds if kind.__name__ in config.architectures)
    torch.set_default_dtype(torch.bfloat16)
    model = kind(config)
    torch.set_default_dtype(torch.float32)
    for parameter in model.parameters():
        parameter.data.zero_()  # also what is padding
    load_checkpoint(model, Path(folder))
    return model


def load_checkpoint(model: Any, folder: Path) -> None:
    from safetensors.torch import load_file

    model.load_weights(load_file(folder / "model.safetensors").items())


class Runner:
    """What SGLang's weight updaters need of a worker: the model, and its updater."""

    def __init__(self, rank: int, folder: str) -> None:
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
        from sglang.srt.runtime_context import get_model

        self.model = build_model(folder)
        self.weight_updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=-1,
            model_config=None,
            custom_weight_loaders=get_model().custom_weight_loader,
            get_model=lambda: self.model,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: self,
        )

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        return [("target", self)]

    def deserialize_own_rank(self, payloads: list[bytes]) -> Any:
        from sglang.srt.managers.tp_worker import BaseTpWorker

        return BaseTpWorker.deserialize_own_rank(self, payloads)


class Scheduler:
    """The scheduler of a rank, as far as it takes control requests."""

    def __init__(self, rank: int, folder: str) -> None:
        from sglang.srt.managers import io_struct
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.utils import TypeBasedDispatcher

        self.rank, self.folder = rank, folder
        self.paused, self.flushed, self.running = "", 0, 0
        self.versions: list[str] = []
        self.runner = Runner(rank, folder)
        updater = SchedulerWeightUpdaterManager(
            tp_worker=self.runner,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self.flush_cache,
            is_fully_idle=lambda **_: True,
            scheduler=self,
        )
        self.take = TypeBasedDispatcher(
            [
                (io_struct.BeginWeightUpdateReqInput, updater.begin_weight_update),
                (io_struct.EndWeightUpdateReqInput, updater.end_weight_update),
                (io_struct.UpdateWeightsFromTensorReqInput, updater.update_weights_from_tensor),
                (io_struct.PauseGenerationReqInput, self.pause),
                (io_struct.ContinueGenerationReqInput, self.resume),
                (io_struct.GetInternalStateReq, self.state),
                (dict, self.test),
            ]
        )

    def flush_cache(self, **_: Any) -> bool:
        """As in SGLang: refused while requests run, unless `retract` has returned them to the queue."""
        if self.running and self.paused != "retract":
            return False
        self.flushed += 1
        return True

    def record_weight_version_change(self, new_version: str | None) -> None:
        if new_version is not None:
            self.versions.append(new_version)

    def pause(self, asked: Any) -> None:
        self.paused = asked.mode

    def resume(self, _: Any) -> None:
        self.paused = ""

    def state(self, _: Any) -> Any:
        from sglang.srt.managers.io_struct import GetInternalStateReqOutput

        return GetInternalStateReqOutput(internal_state={})

    def test(self, asked: dict[str, Any]) -> dict[str, Any]:
        """What tests ask for: to compare weights with a checkpoint, to write others, or to fail."""
        if "equals" in asked:
            return {"equals": self.equals(asked["equals"])}
        if "load" in asked:
            load_checkpoint(self.runner.model, Path(asked["load"]))
        if asked.get("fail") == self.rank:
            fail_once(self.runner.model)
        if asked.get("die") == self.rank:
            die_in_commit(self.runner.model)
        self.running = asked.get("running", self.running)
        known = {"paused": self.paused, "flushed": self.flushed, "versions": self.versions}
        return {**known, "names": sorted(name for name, _ in self.runner.model.named_parameters())}

    def equals(self, folder: str) -> bool:
        import torch

        live, fresh = (dict(one.named_parameters()) for one in (self.runner.model, build_model(folder)))
        return live.keys() == fresh.keys() and all(
            torch.equal(live[name].data.view(torch.int16), fresh[name].data.view(torch.int16)) for name in live
        )


def fail_once(model: Any) -> None:
    """Have this rank fail after it has written the next version."""
    engine = model.pulse_rank._follower._engine

    def fail() -> None:
        del engine.synchronize
        raise RuntimeError("the GPU is lost")

    engine.synchronize = fail


def die_in_commit(model: Any) -> None:
    model.pulse_rank._follower._engine.synchronize = lambda: os._exit(9)


def run_rank(rank: int, ranks: int, port: int, folder: str, pipe: Connection, others: list[Connection]) -> None:
    """Serve control requests; an error ends the process, as it ends SGLang's scheduler.

    The others are ends of the server that this process was forked with: while one is open, no rank notices that the
    server has ended.
    """
    for one in others:
        one.close()
    from sglang.srt.plugins import load_plugins

    arguments = publish_arguments(ranks, folder, rank)
    load_plugins()
    start_groups(arguments, rank, ranks, port)
    scheduler = Scheduler(rank, folder)
    pipe.send("ready")
    while True:
        asked = pipe.recv()
        pipe.send((scheduler.take(asked),))


# The process that serves


def make_manager(pipes: list[Connection], arguments: Any) -> Any:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.utils.aio_rwlock import RWLock
    from sglang.utils import TypeBasedDispatcher

    class Manager(TokenizerManager):
        """SGLang's own manager, with pipes to the ranks."""

        def __init__(self) -> None:
            self._result_dispatcher = TypeBasedDispatcher([])
            self.init_communicators()
            self.is_pause, self.is_pause_cond = False, asyncio.Condition()
            self.model_update_lock = RWLock()
            self.server_args, self.mm_processor = arguments, None
            self.tasks: set[asyncio.Task[None]] = set()
            self.model_path = self.served_model_name = "tiny"
            self.is_generation, self.startup_time = True, 0.0
            self.model_config = SimpleNamespace(
                is_image_understandable_model=False, is_audio_understandable_model=False, hf_config=None
            )
            self.turns = threading.Lock()

        def auto_create_handle_loop(self) -> None:
            pass

        def ask(self, asked: Any) -> list[Any]:
            with self.turns:
                try:
                    for pipe in pipes:
                        pipe.send(asked)
                    return [pipe.recv()[0] for pipe in pipes]
                except (EOFError, OSError):
                    os._exit(3)  # SGLang ends with its schedulers

        async def _deliver(self, asked: Any) -> None:
            answer = (await asyncio.to_thread(self.ask, asked))[0]  # rank 0 answers, as in SGLang
            if answer is not None:
                self._result_dispatcher(answer)

        def _dispatch_to_scheduler(self, asked: Any) -> None:
            task = asyncio.create_task(self._deliver(asked))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

        async def _async_dispatch_to_scheduler(self, asked: Any) -> None:
            await self._deliver(asked)

    return Manager()


def make_engine(manager: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """SGLang's offline `Engine`, with the manager of this server."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine.__new__(Engine)
    engine.tokenizer_manager, engine.server_args = manager, manager.server_args
    engine.loop = SimpleNamespace(
        run_until_complete=lambda doing: asyncio.run_coroutine_threadsafe(doing, loop).result()
    )
    return engine


def update_offline(engine: Any, message: dict[str, Any]) -> Any:
    """What docs/integrations/sglang.md has a script do with an offline engine."""
    from pulsesync.integrations.sglang import request

    engine.begin_weight_update()
    success, answer = engine.update_weights_from_tensor(request(message), load_format=LOADER)
    engine.end_weight_update()
    return [success, answer]


async def serve(port: int, pipes: list[Connection], arguments: Any) -> None:
    import uvicorn
    from fastapi import Request
    from sglang.srt.entrypoints import http_server

    manager = make_manager(pipes, arguments)
    http_server.set_global_state(http_server._GlobalState(manager, None, {}))

    engine = make_engine(manager, asyncio.get_running_loop())

    @http_server.app.post("/test")
    async def test(request: Request) -> Any:
        asked = json.loads(await request.body())
        if "engine" in asked:
            return await asyncio.to_thread(update_offline, engine, asked["engine"])
        return await asyncio.to_thread(manager.ask, asked)

    config = uvicorn.Config(http_server.app, host="127.0.0.1", port=port, lifespan="off", log_level="warning")
    await uvicorn.Server(config).serve()


def main(port: int, ranks: int, folder: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = taken.getsockname()[1]
    import_sglang()
    import_module("sglang.srt.entrypoints.http_server")
    context = multiprocessing.get_context("fork")
    pipes = []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        pipes.append(ours)
        arguments = (rank, ranks, meeting, folder, theirs, pipes)
        context.Process(target=run_rank, args=arguments, daemon=True).start()
        theirs.close()
    from sglang.srt.plugins import load_plugins

    published = publish_arguments(ranks, folder)
    load_plugins()
    for pipe in pipes:
        assert pipe.recv() == "ready"
    asyncio.run(serve(port, pipes, published))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
