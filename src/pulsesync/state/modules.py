"""The tensors of a torch module without `state_dict`, which calls two functions a module and detaches every tensor."""

import sys
from typing import Any, NamedTuple

# What `state_dict` does is in these functions of torch, and it reads these attributes, which every module has.
_SAVE = "_save_to_state_dict"
_FUNCTIONS = ("state_dict", _SAVE, "get_extra_state")
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks")
_ATTRIBUTES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *_HOOKS)


class _Plain(NamedTuple):
    """What is known to be plain while a module is read."""

    home: dict[str, Any]  # the names of the module of torch that defines `nn.Module`
    tensors: set[type]  # classes of tensors
    modules: set[type]  # classes of modules, as far as they were seen


def tensors_of(module: Any) -> dict[str, Any] | None:
    """What `module.state_dict()` contains, with parameters not detached; None: something may change what it does.

    The modules are visited at each call, because any of them can be replaced, or get a hook, at any time.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(module, torch.nn.Module):
        return None
    found: dict[str, Any] = {}
    plain = _Plain(vars(torch.nn.modules.module), {torch.Tensor, torch.nn.Parameter}, set())
    try:
        return found if _add(module, "", found, plain) else None
    except KeyError:  # a module lacks one of the attributes, and may compute it
        return None


def _add(module: Any, prefix: str, found: dict[str, Any], plain: _Plain) -> bool:
    """Add the tensors of a module and of those in it, in the order of `state_dict`; return whether all are plain."""
    kind = type(module)
    if kind not in plain.modules:
        if not _is_plain(kind, plain.home):
            return False
        plain.modules.add(kind)
    own, tensors = module.__dict__, plain.tensors
    if own["_state_dict_pre_hooks"] or own["_state_dict_hooks"] or "state_dict" in own or _SAVE in own:
        return False
    if parameters := own["_parameters"]:
        for name, tensor in parameters.items():
            if tensor is not None:
                found[prefix + name] = tensor if type(tensor) in tensors else tensor.detach()
    if buffers := own["_buffers"]:
        hidden = own["_non_persistent_buffers_set"]
        for name, tensor in buffers.items():
            if tensor is not None and name not in hidden:
                found[prefix + name] = tensor if type(tensor) in tensors else tensor.detach()
    if modules := own["_modules"]:
        for name, inner in modules.items():
            if inner is not None and not _add(inner, f"{prefix}{name}.", found, plain):
                return False
    return True


def _is_plain(kind: type, home: dict[str, Any]) -> bool:
    """Whether a class of modules has the functions of torch, neither overridden nor patched, and plain attributes.

    home: the names of the module of torch that defines them.
    """
    functions = (getattr(kind, name, None) for name in _FUNCTIONS)
    find: Any = kind.__getattribute__
    return (
        all(getattr(function, "__globals__", None) is home for function in functions)
        and find is object.__getattribute__
        and not any(hasattr(kind, name) for name in _ATTRIBUTES)
    )
