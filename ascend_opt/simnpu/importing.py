"""Import hooks that let the unmodified packages find the simulated device.

Nothing on disk in torch_npu, vllm or vllm_ascend is changed, and no function of theirs is patched:
a few modules that only exist on an Ascend machine are supplied, and torch_npu and triton get their
kernels right after they were imported.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_C_EXTENSION = "vllm_ascend.vllm_ascend_C"
# Ascend-only wheels that no dense model needs: importable, unusable.
_ABSENT = frozenset({"fla_npu"})


def _install_operators(module: ModuleType) -> None:
    from ascend_opt.simnpu import operators

    operators.install()


def _install_triton(module: ModuleType) -> None:
    from ascend_opt.simnpu import operators, triton_interpreter

    # Triton may be imported before torch_npu, whose library the operator library links against:
    # so that one is loaded at the first launch.
    triton_interpreter.install(
        module, lambda tensor: operators.library().alias(tensor), operators.launch
    )
    if os.environ.get("SIMNPU_COMPUTE") == "none":
        triton_interpreter.compute_nothing(operators.library)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "torch_npu": _install_operators,
    "triton": _install_triton,
}


class _AfterImport(importlib.abc.Loader):
    """A module's own loader, and then our hook."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _AFTER[module.__name__](module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Supplied(importlib.abc.Loader):
    """A module that exists only on an Ascend machine."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _C_EXTENSION:
            from ascend_opt.simnpu import operators

            operators.define_c_ascend()
            return
        name = module.__name__

        def refuse(attribute: str) -> object:
            if attribute.startswith("__"):
                raise AttributeError(attribute)

            def absent(*args: object, **kwargs: object) -> None:
                raise NotImplementedError(f"simnpu supplies no {name}.{attribute}")

            return absent

        module.__dict__["__getattr__"] = refuse


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == _C_EXTENSION:
            return importlib.machinery.ModuleSpec(fullname, _Supplied())
        if fullname.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(fullname, _Supplied(), is_package=True)
        if fullname not in _AFTER:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _AfterImport(spec.loader)
                return spec
        return None


def arm() -> None:
    """Put the import hooks in place. Idempotent; called at Python's start-up under simnpu."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
