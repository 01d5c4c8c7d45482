"""Compares each kernel's signature with the schema that the real packages register.

Prints RESULT and a list of differences. Run over the simulated device.
"""

import inspect
import json
import math

import torch
import torch_npu.op_plugin.atb._atb_ops  # noqa: F401 -- declares the atb operators
import vllm_ascend.vllm_ascend_C  # noqa: F401 -- declares the _C_ascend operators

from ascend_opt.simnpu.kernels import KERNELS, META


def same(default: object, ours: object) -> bool:
    """Compare two defaults; schemas print floats with all their digits."""
    if isinstance(default, float) and isinstance(ours, (int, float)):
        return math.isclose(default, ours)
    return default == ours


def differences(function: object, schema: torch.FunctionSchema) -> list[str]:
    """List what of a schema a function does not take as it is declared."""
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    ours = {name: p for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    declared = {argument.name: argument for argument in schema.arguments}
    found = [f"{name} is not in the schema" for name in ours.keys() - declared.keys()]
    positional = [name for name, argument in declared.items() if not argument.kwarg_only]
    if positional != [name for name, p in ours.items() if p.kind is not p.KEYWORD_ONLY]:
        found.append(f"positional arguments are {positional}")
    for name, argument in declared.items():
        if name not in ours:
            if not (takes_any and argument.kwarg_only):
                found.append(f"{name} is missing")
        elif argument.has_default_value():
            if not same(argument.default_value, ours[name].default):
                found.append(f"{name} defaults to {argument.default_value!r}")
        elif ours[name].default is not inspect.Parameter.empty:
            found.append(f"{name} has no default")
    return found


def main() -> None:
    """Compare all of them."""
    schemas = {}
    for schema in torch._C._jit_get_all_schemas():
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        schemas[schema.name + overload] = schema
    wrong, namespaces = [], set()
    for table in (KERNELS, META):
        for name, function in table.items():
            # vllm-ascend's own operators differ from release to release; torch_npu's do not.
            if name not in schemas:
                if not name.startswith("_C_ascend::"):
                    wrong.append(f"{name}: no such operator")
                continue
            namespaces.add(name.partition("::")[0])
            wrong += [f"{name}: {each}" for each in differences(function, schemas[name])]
    print("RESULT", json.dumps({"wrong": wrong, "namespaces": sorted(namespaces)}))


if __name__ == "__main__":
    main()
