"""Hugging Face's Trainer, and those derived from it such as TRL's: publish the weights after each optimizer step.

    from pulsesync.integrations.huggingface import PulseCallback

    trainer = Trainer(..., callbacks=[PulseCallback("s3://bucket/run")])

What is published is what `save_pretrained` would write: those names, `config.json` and the tokenizer's files. So any
worker can follow, and `pulse follow` makes a folder that `from_pretrained` and vLLM load. For a loop of your own, see
`checkpoint_weights` and `checkpoint_files` in `pretrained`, and `merged_weights` and `adapter_weights` in `peft`.

transformers is imported when `PulseCallback` is first asked for: the class is made then, from `PublishingCallback`,
which has all of its code, and transformers' `TrainerCallback`.
"""

import inspect
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cache, partial
from threading import Lock
from typing import Any, Literal, get_args

from pulsesync.core.arguments import one_of
from pulsesync.errors import StateError
from pulsesync.group.collective import Collective
from pulsesync.integrations import pretrained
from pulsesync.integrations.peft import SaveEmbeddings, adapter_weights, is_peft, merged_model, merged_weights
from pulsesync.publish.pending import PublishReport
from pulsesync.publish.publisher import Publisher
from pulsesync.publish.sharded import ShardedPublisher
from pulsesync.state.views import CASTS, read_cast
from pulsesync.store import Location

__all__ = ["PulseCallback"]  # noqa: F822 - by __getattr__, below

Adapters = Literal["merged", "only"]
_CASTS = {"bf16": "BF16", "fp16": "F16"}  # mixed precision -> dtype of the format
logger = logging.getLogger(__name__)


class PublishingCallback:
    """Publishes the weights of a Trainer: when training begins, and after every optimizer step.

    The first version has the weights that training starts with. A run that exists is resumed: version numbers increase,
    and the step is the trainer's. Another model is refused, unless the Trainer has loaded a checkpoint; `resume=True`
    publishes it nevertheless. When training ends, everything is sent and the publisher is closed; another `train()`
    resumes the run. After an exception in training, call `close`, or let the process end: what was published is sent
    then.

    FP32 master weights are published in the dtype of mixed precision (`bf16=True` or `fp16=True`), weights that are in
    BF16 or FP16 as they are. FP32 weights that are trained without mixed precision are published as FP32, with a
    warning; `cast=` decides otherwise.

    With several processes, rank 0 publishes. A model that FSDP2 has sharded is published by all ranks together, each
    its own shards, through a `ShardedPublisher` with a process group of its own. FSDP1 and DeepSpeed ZeRO-3 are an
    error.

    A PEFT model is published with its active adapters merged, into new tensors, or as the adapter alone.

    If a version could not be published, that is logged, and the next step raises the error (a retryable `StoreError`
    only when `max_failures` consecutive versions have failed). Nothing is lost or half written: the last version in the
    store is complete, and the next one that succeeds contains all steps since.

    Which weights a worker generated with is known by version. `versions` has the version of each step that is in the
    store, and `version_of` waits for it. Steps that follow each other faster than they can be sent share a version; for
    one version a step, pass `every_step=True`, with which a step waits for the store if it has to. On ranks that do not
    publish, `versions` is empty.

    Args:
        location: A path or URL of the run, or a store.
        adapters: How a PEFT model is published: "merged", which is the default, or "only": its active adapter, under
            the names of `adapter_model.safetensors`, with `adapter_config.json`.
        every_step: Make a version of every step.
        options: As for `Publisher`: `cast`, `signing_key`, `publish_every`, `link`, `keep`, `spool`, …. `files` are
            added to the model's. With FSDP2, `team` is the team of all ranks.

    Raises:
        TypeError: an option that Publisher does not have; ValueError: an argument that is not one of its choices.
    """

    def __init__(
        self, location: Location, *, adapters: Adapters | None = None, every_step: bool = False, **options: Any
    ) -> None:
        if adapters is not None:
            one_of("adapters", adapters, get_args(Adapters))
        if unknown := sorted(options.keys() - (inspect.signature(Publisher).parameters.keys() - {"_removed"})):
            raise TypeError(f"Publisher has no option {unknown[0]!r}; its options are listed in its docstring")
        if every_step and options.get("publish_every", 1) != 1:
            raise ValueError("every_step=True makes a version of every step; leave publish_every out")
        self.location, self.adapters, self.every_step, self.options = location, adapters, every_step, options
        self._forget()

    def _forget(self) -> None:
        self.publisher: Publisher | None = None  # while training, on ranks that publish
        self.versions: dict[int, int] = {}  # step -> version that contains it, once it is in the store
        self.sent_bytes = 0  # by all versions of this callback, without anchors
        self._as: Adapters | None = None  # how the model is published; None: it has no adapters
        self._save_embeddings: SaveEmbeddings = "auto"
        self._lock = Lock()
        self._futures: dict[int, Future[PublishReport]] = {}  # of steps that are in no version yet
        self._later: set[int] = set()  # those of them that failed or were left out: the next version has them
        self._counted = -1  # the last version whose bytes were counted

    # Trainers, and programs that tune them, may copy and pickle callbacks. A copy starts without a publisher.

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("location", "adapters", "every_step", "options")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # The events of a Trainer

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, processing_class: Any = None, **_: Any
    ) -> None:
        """Publish the weights that training starts with. Raises: as `Publisher.publish`; StateError."""
        model = pretrained.unwrapped(model)
        pretrained.check_publishable(model)
        sharded = pretrained.is_sharded(model.parameters())
        if not sharded and not state.is_world_process_zero:
            return
        self._as = self.adapters or ("merged" if is_peft(model) else None)
        weights = self._weights(model)
        if self.publisher is None:
            options = {**self.options, "cast": self._cast(weights, args)}
            options.setdefault("resume", state.global_step > 0)  # the Trainer has loaded a checkpoint
            options["files"] = {**self._files(model, processing_class, options["cast"]), **(options.get("files") or {})}
            self.publisher = self._open(sharded, args, options)
        self._publish(weights, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Publish the weights after an optimizer step. Raises: as `Publisher.publish`."""
        if self.publisher is not None:
            self._publish(self._weights(model), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Send everything and close. Raises: as `Publisher.close`."""
        if self.publisher is None:
            return
        if args.load_best_model_at_end or self.options.get("publish_every", 1) != 1:
            # the best weights were loaded after the last step; or the last steps may be in no version
            self._publish(self._weights(model), state.global_step, now=True)
        publisher = self.publisher
        self.close()
        logger.info(
            "Published up to version %s (step %d) at %s: %s bytes, and %s bytes of anchors.",
            publisher.version,
            state.global_step,
            self.location,
            f"{self.sent_bytes:,}",
            f"{publisher.anchor_bytes:,}",
        )

    # For programs that generate with the published weights

    def version_of(self, step: int, timeout_s: float | None = None) -> int:
        """Return the version that contains a step, once it is in the store.

        Args:
            step: A step that was published by this callback: the trainer's `global_step`.
            timeout_s: How long to wait; None: until it is sent or has failed.

        Raises:
            StateError: this process did not publish the step, or `publish_every` leaves it to a later version;
            TimeoutError; or the error of the version, which the next step does not raise again.
        """
        with self._lock:
            known, future = self.versions.get(step), self._futures.get(step)
        if known is None and future is not None:
            known = future.result(timeout_s).version
        if known is None:
            raise StateError(
                f"step {step} is in no version of {self.location}: it was not published yet, publish_every skipped it, "
                "or this process does not publish; without FSDP2, call this on rank 0"
            )
        return known

    def flush(self) -> None:
        """Wait until all steps so far are in the store. Raises: as `Publisher.flush`."""
        if self.publisher is not None:
            self.publisher.flush()

    def close(self) -> None:
        """Send everything and close the publisher, as the end of training does. Raises: as `Publisher.close`."""
        publisher, self.publisher = self.publisher, None
        if publisher is not None:
            publisher.close()

    # What is published, and how

    def _weights(self, model: Any) -> dict[str, Any]:
        if self._as is None:
            return pretrained.checkpoint_weights(model)
        if self._as == "merged":
            return merged_weights(model)
        weights, _ = adapter_weights(model, save_embeddings=self._save_embeddings)
        if self._save_embeddings == "auto":  # decided once: PEFT may ask the Hub each time
            self._save_embeddings = weights.keys() != adapter_weights(model, save_embeddings=False)[0].keys()
        return weights

    def _files(self, model: Any, processing_class: Any, cast: Any) -> dict[str, bytes]:
        if self._as == "only":
            return adapter_weights(model, save_embeddings=self._save_embeddings)[1]
        chosen = read_cast(cast).get("*")
        whole = merged_model(model) if self._as == "merged" else model
        return pretrained.checkpoint_files(whole, processing_class, dtype=CASTS.get(chosen or ""))

    def _cast(self, weights: Mapping[str, Any], args: Any) -> Any:
        """Return the cast of the options, or the one that mixed precision needs."""
        if (asked := self.options.get("cast")) is not None:
            return asked
        dtypes = {str(tensor.dtype) for tensor in weights.values() if tensor.is_floating_point()}
        if dtypes != {"torch.float32"}:
            return None
        # `mixed_precision` also has the choice of `accelerate launch`
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else getattr(args, "mixed_precision", "no")
        if precision not in _CASTS:
            logger.warning(
                "Publishing FP32 weights, because this training uses no mixed precision: twice the bytes of BF16, and "
                "most weights change in every step, so that patches are large. Pass cast='BF16' if workers use BF16, "
                "or cast={} to publish FP32 without this warning."
            )
            return {}
        return _CASTS[precision]

    def _open(self, sharded: bool, args: Any, options: dict[str, Any]) -> Publisher:
        if not sharded:
            return Publisher(self.location, **options)
        team = options.pop("team", None)
        if team is None:
            from torch import distributed

            # Over gloo wherever the shards are: a background thread of each rank sends digests and sizes to the others.
            # It is not destroyed here, but with all other groups: torch 2.13 can deadlock when a gloo group is
            # destroyed right after its last message, because it waits, with the GIL, for a thread that needs the GIL.
            team = Collective(distributed.new_group(backend="gloo"), timeout_s=float(args.ddp_timeout))
        return ShardedPublisher(self.location, team, **options)

    def _publish(self, weights: Mapping[str, Any], step: int, now: bool = False) -> None:
        assert self.publisher is not None
        future = self.publisher.publish(weights, step=step, wait=False, now=now, coalesce=not self.every_step)
        with self._lock:
            self._futures[step] = future
            self.versions.pop(step, None)  # from an earlier publish of this step
        future.add_done_callback(partial(self._record, step))

    def _record(self, step: int, future: "Future[PublishReport]") -> None:
        """Note the version of a step. Runs on the thread that sends."""
        # Not future.exception(): the publisher would count the failure as read, and not raise it.
        failed = Future.exception(future) is not None
        report = None if failed else Future.result(future)
        with self._lock:
            if report is None or report.version is None:
                self._later.add(step)
                return
            for one in {step, *(later for later in self._later if later < step)}:
                self.versions[one] = report.version
                self._futures.pop(one, None)
                self._later.discard(one)
            if report.version > self._counted:
                self._counted = report.version
                self.sent_bytes += report.payload_bytes


@cache
def _pulse_callback() -> type:
    """Make `PulseCallback`. Raises: PulseError, if transformers is not installed."""
    bases = (PublishingCallback, pretrained.required("transformers").TrainerCallback)
    inside = {"__doc__": PublishingCallback.__doc__, "__module__": __name__}  # so that pickle finds it
    return type("PulseCallback", bases, inside)


def __getattr__(name: str) -> Any:
    if name == "PulseCallback":
        return _pulse_callback()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
