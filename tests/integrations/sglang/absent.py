"""Packages that SGLang imports and this environment has not: their names can be imported, and nothing of them works.

torchvision on PyPI is built for CUDA and cannot be imported next to torch for CPUs; soundfile reads audio; from vLLM
comes the kernel of rotary embeddings where SGLang has none of its own. The weights of a model need none of it.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ABSENT = ("soundfile", "torchvision", "vllm")


class _AbsentType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(name, (), {})


class _AbsentModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to execute."""


def install() -> None:
    """Let the packages be imported, once transformers has seen that they are not there."""
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    sys.meta_path.append(_Finder())
