"""What `save_pretrained` would write of a model that is being trained: names, weights and companion files.

    publisher = Publisher("s3://bucket/run", cast="BF16", files=checkpoint_files(model, tokenizer, dtype="bfloat16"))
    publisher.publish(checkpoint_weights(model), step=step, wait=False)

Nothing is written to disk and no weight is copied, unless the layout of the model's checkpoints differs from that of
its modules, as it can for mixture-of-experts models.
"""

import copy
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pulsesync.core.extras import load
from pulsesync.errors import StateError
from pulsesync.state.checkpoint_files import companions

__all__ = ["checkpoint_files", "checkpoint_weights"]

_WRAPPERS = {"DistributedDataParallel", "DataParallel", "DeepSpeedEngine"}  # classes that have the model as `module`


def required(name: str) -> Any:
    """Return a module of transformers or PEFT. Raises: PulseError, which names the extra, if it is not installed."""
    return load(name, "hf")


def unwrapped(model: Any) -> Any:
    """Return the model inside the wrappers of DistributedDataParallel, DataParallel, DeepSpeed and torch.compile."""
    while True:
        inner = getattr(model, "_modules", {})
        if "_orig_mod" in inner:
            model = inner["_orig_mod"]
        elif type(model).__name__ in _WRAPPERS and hasattr(model, "module"):
            model = model.module
        else:
            return model


def is_sharded(tensors: Iterable[Any]) -> bool:
    """Return whether some tensor is a DTensor, as with FSDP2 and tensor parallelism."""
    return any(hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") for tensor in tensors)


def check_publishable(model: Any) -> None:
    """Raises: StateError, if parameters cannot be read in place: partitioned by ZeRO-3 or FSDP1, or not in memory."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise StateError(
            "FSDP1 has flattened the model's parameters, and they cannot be published; use FSDP2 (fsdp_config="
            "{'version': 2}), whose shards are published where they are"
        )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "ds_id"):
            raise StateError(
                f"DeepSpeed ZeRO-3 has partitioned parameter {name!r}, and its shards cannot be published; use FSDP2, "
                "or ZeRO stage 1 or 2, or gather the weights yourself (deepspeed.zero.GatheredParameters) and give "
                "them to a Publisher on rank 0",
                tensor=name,
            )
        if parameter.device.type == "meta":
            raise StateError(
                f"parameter {name!r} is offloaded: it is on the device 'meta', without weights; train without "
                "offloading, or load the model completely",
                tensor=name,
            )


def checkpoint_weights(model: Any) -> dict[str, Any]:
    """Return the weights of a model under the names that `save_pretrained` would write, in the memory of the model.

    Wrappers are removed from the model, and `_orig_mod` from names. Tied weights stay tied: they are returned under all
    their names, in the same memory. Where a checkpoint's layout differs from the modules' (transformers converts some
    models when it loads and saves them), each call creates those tensors anew.

    Args:
        model: A transformers model or any other module, wrapped or not; with FSDP2 its values are DTensors.

    Raises:
        StateError: the parameters are partitioned by DeepSpeed ZeRO-3 or FSDP1, are offloaded, or are sharded in a
            layout that a checkpoint does not have.
    """
    model = unwrapped(model)
    check_publishable(model)
    return as_saved(model, model.state_dict())


def as_saved(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a model's state dict under the names of a checkpoint. Raises: StateError, as `checkpoint_weights`."""
    weights = {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in state.items()}
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        weights.pop(name, None)
    if not hasattr(model, "save_pretrained"):
        return weights
    sharded = is_sharded(weights.values())
    own = {id(tensor) for tensor in weights.values()}
    revert = required("transformers.core_model_loading").revert_weight_conversion
    saved: dict[str, Any] = revert(model, weights)
    if sharded and (made := sorted(name for name, tensor in saved.items() if id(tensor) not in own)):
        raise StateError(
            f"tensor {made[0]!r} of a {type(model).__name__} checkpoint is composed of tensors that are sharded; "
            "publish the modules' own tensors with a ShardedPublisher, and convert them in the worker",
            tensor=made[0],
        )
    return saved


def checkpoint_files(model: Any, processing_class: Any = None, *, dtype: str | None = None) -> dict[str, bytes]:
    """Return the companion files that `save_pretrained` would write with the weights: configuration and tokenizer.

    Args:
        model: A transformers model, wrapped or not. One without a `config` has no files.
        processing_class: Its tokenizer, processor or feature extractor.
        dtype: The dtype of the weights in the configuration, such as "bfloat16"; None: the dtype of the model.

    Raises:
        LimitError: a file is too large to be published with a run.
    """
    model = unwrapped(model)
    files = {}
    if hasattr(getattr(model, "config", None), "to_json_string"):
        config = copy.deepcopy(model.config)
        config.dtype = dtype or str(model.dtype).removeprefix("torch.")
        # FSDP2 derives a class from the model's, and prefixes its name
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        files["config.json"] = config.to_json_string().encode()
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", lambda: False)():
        files["generation_config.json"] = generation.to_json_string().encode()
    return files | processing_files(processing_class)


def processing_files(processing_class: Any) -> dict[str, bytes]:
    """Return the files of a tokenizer, processor or feature extractor; none for None. Raises: LimitError."""
    if not hasattr(processing_class, "save_pretrained"):
        return {}
    with tempfile.TemporaryDirectory(prefix="pulse-") as folder:
        processing_class.save_pretrained(folder)
        return companions(Path(folder))
