"""Publish what PEFT trains: a model with its adapters merged, or only the adapters.

    publisher.publish(merged_weights(model), step=step, wait=False)          # a full model, for any engine

    weights, files = adapter_weights(model)                                  # megabytes, for engines that load LoRA
    publisher = Publisher("s3://bucket/adapter", files=files)
    publisher.publish(weights, step=step, wait=False)

Merging in place and undoing it afterwards changes base weights by rounding. Here nothing is merged in place: PEFT's own
`merge_and_unload` runs on a second tree of modules, which shares the model's parameters, except for those that a merge
writes to, which are copied first. So the result is that of `merge_and_unload` on a copy of the model, bit for bit, and
neither the base weights nor the adapters change.

Memory: every call creates new merged tensors. Until they are published, they take as much memory as the base weights of
all adapted modules, on the same device.
"""

import copy
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, Literal

from pulsesync.errors import StateError
from pulsesync.integrations import pretrained
from pulsesync.state.checkpoint_files import ADAPTER_CONFIG

__all__ = ["adapter_weights", "merged_weights"]

# Each of them is tested: the result equals that of merge_and_unload, and the model is not changed.
MERGEABLE = ("LORA", "IA3", "LOHA", "LOKR", "OFT", "BOFT", "HRA", "VERA", "TRAINABLE_TOKENS")

SaveEmbeddings = bool | Literal["auto"]


def is_peft(model: Any) -> bool:
    """Return whether a module, wrapped or not, is a PEFT model, or has adapters that transformers has added."""
    model = pretrained.unwrapped(model)
    return hasattr(model, "peft_config") and bool(model.peft_config)


def merged_weights(model: Any) -> dict[str, Any]:
    """Return the weights that `merge_and_unload` would give on a copy of the model, under the names of a checkpoint.

    The active adapters are merged, in the base weights' dtype. Merged tensors are new with every call, all others are
    in the memory of the model. The model is not changed. It must not be trained while this runs.

    Args:
        model: A `PeftModel`, wrapped by DistributedDataParallel or torch.compile or not.

    Raises:
        StateError: the adapters cannot be merged: because of their method, because the base weights are quantised,
        partitioned or sharded, or because adapters of several methods are mixed. PulseError: PEFT is not installed.
    """
    merged = merged_model(model)
    return pretrained.as_saved(merged, merged.state_dict())


def merged_model(model: Any) -> Any:
    """Return the base model with new tensors for what a merge changes. Only its weights and configuration may be used.

    Raises: as `merged_weights`.
    """
    import torch

    peft = pretrained.required("peft")
    model = _peft_model(model, peft)
    _check_mergeable(model)
    tuners: Any = pretrained.required("peft.tuners.tuners_utils")
    fresh: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, tuners.BaseTunerLayer):
            for parameter in module.get_base_layer().parameters():
                if id(parameter) not in fresh:
                    copied = parameter.detach().clone()
                    fresh[id(parameter)] = torch.nn.Parameter(copied, requires_grad=parameter.requires_grad)
    with torch.no_grad():
        return _twin(model, fresh, {}).merge_and_unload()


def adapter_weights(
    model: Any, adapter: str | None = None, *, save_embeddings: SaveEmbeddings = "auto"
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the weights of one adapter under the names of `adapter_model.safetensors`, and its `adapter_config.json`.

    The weights are in the memory of the model. `pulse follow` writes a run of them as a folder that vLLM, and
    `PeftModel.from_pretrained`, load as an adapter.

    Args:
        model: A `PeftModel`, wrapped by DistributedDataParallel or torch.compile or not; with FSDP2 its values are
            DTensors.
        adapter: The name of the adapter; None: the active one.
        save_embeddings: Whether the embeddings belong to the adapter. "auto" is PEFT's rule, for which it may ask the
            Hugging Face Hub each time.

    Raises:
        StateError: there is no such adapter, several are active and none is named, or the parameters are partitioned.
        PulseError: PEFT is not installed.
    """
    peft = pretrained.required("peft")
    model = _peft_model(model, peft)
    pretrained.check_publishable(model)
    if adapter is None:
        active = model.active_adapters
        if len(active) != 1:
            raise StateError(
                f"the model has {len(active)} active adapters, {active}; pass the name of the one to publish"
            )
        adapter = active[0]
    if adapter not in model.peft_config:
        raise StateError(f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, model.peft_config))}")
    found = peft.get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=save_embeddings)
    weights = {name.replace("_orig_mod.", ""): tensor.detach() for name, tensor in found.items()}
    return weights, {ADAPTER_CONFIG: _adapter_config(model, adapter)}


def _peft_model(model: Any, peft: Any) -> Any:
    model = pretrained.unwrapped(model)
    if isinstance(model, peft.PeftModel):
        return model
    if is_peft(model):
        raise StateError(
            "the adapters of this model were added by transformers (model.add_adapter); wrap the model with "
            "peft.get_peft_model instead, which can merge and save them"
        )
    raise StateError(f"expected a PeftModel, got {type(model).__name__}; publish its weights as they are")


def _check_mergeable(model: Any) -> None:
    """Raises: StateError, if merging is not possible or not tested."""
    pretrained.check_publishable(model)
    for name, config in model.peft_config.items():
        method = str(getattr(config.peft_type, "value", config.peft_type))
        if method not in MERGEABLE:
            raise StateError(
                f"adapter {name!r} uses the method {method}, which cannot be merged; methods that can are "
                f"{', '.join(MERGEABLE)}. Publish only the adapter (adapters='only')"
            )
    if getattr(model.get_base_model(), "hf_quantizer", None) is not None:
        raise StateError(
            "the base model is quantised, and merging would quantise it again; publish only the adapter "
            "(adapters='only')"
        )
    if pretrained.is_sharded(model.parameters()):
        raise StateError(
            "the model is sharded (FSDP2 or tensor parallelism), and adapters cannot be merged into shards; publish "
            "only the adapter (adapters='only')"
        )


def _twin(module: Any, fresh: dict[int, Any], made: dict[int, Any]) -> Any:
    """Return a second tree of modules with the same parameters and buffers, except for those in `fresh`, by id.

    Attributes are shared, except for dictionaries, lists and sets, which are copied one level deep, and the
    configuration, which a merge may change. Attributes that are modules are replaced by their twins.
    """
    import torch

    if id(module) in made:
        return made[id(module)]
    twin: Any = object.__new__(type(module))
    made[id(module)] = twin
    for name, value in vars(module).items():
        if type(value) in (dict, OrderedDict, list, set):
            value = value.copy()  # most attributes are empty tables of hooks, for which copy.copy is slow
        elif name == "config" or isinstance(value, dict | list | set):
            value = copy.copy(value)
        elif isinstance(value, torch.nn.Module):
            value = _twin(value, fresh, made)
        vars(twin)[name] = value
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else _twin(child, fresh, made)
    for name, parameter in module._parameters.items():
        twin._parameters[name] = fresh.get(id(parameter), parameter)
    return twin


def _adapter_config(model: Any, adapter: str) -> bytes:
    """Return the configuration of an adapter as `PeftModel.save_pretrained` writes it."""
    config = copy.copy(model.peft_config[adapter])
    inner = model.base_model if config.is_prompt_learning else model.base_model.model
    config.base_model_name_or_path = config.base_model_name_or_path or vars(inner).get("name_or_path") or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        base = model._get_base_model_class(is_prompt_tuning=config.is_prompt_learning)
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory(prefix="pulse-") as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        return (Path(folder) / ADAPTER_CONFIG).read_bytes()
