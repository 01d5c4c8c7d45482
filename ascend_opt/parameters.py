"""Parameters of a pass: a frozen dataclass, validated and described by pydantic.

pydantic is imported when there is something to validate, not before: enabling a pass with its
defaults does not pay for it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from ascend_opt.errors import ParameterError, nearest

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema


@dataclasses.dataclass(frozen=True)
class NoParameters:
    """The parameters of a pass that has none."""


_UNITS = {
    "b": 1,
    **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)},
    **{f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(value: object) -> int:
    """Return a size in bytes from an integer or from text like `18MiB`, `512 KiB` or `1GB`.

    Raises:
        ValueError: Anything else, a negative size included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ValueError(f"a size cannot be negative, found {value}")
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].lower() or "b") if match else None
    if match is None or unit is None:
        raise ValueError(
            f"found {value!r}, expected a number of bytes or a size like '18MiB' "
            "(units: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB)"
        )
    return int(Fraction(match[1]) * unit)


class _ByteSize:
    """Tells pydantic how to read and describe a size, without importing it here."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(parse_bytes)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(([kKmMgGtT][iI]?)?[bB])?\s*$"},
            ],
            "description": "bytes, or a size like 18MiB",
        }


ByteSize = Annotated[int, _ByteSize]
"""A size in bytes; also read from text such as `18MiB`."""


def names(schema: type) -> list[str]:
    """Return the parameter names of a pass's `Parameters` dataclass, in order."""
    return [field.name for field in dataclasses.fields(schema)]


def resolve(owner: str, schema: type, given: Mapping[str, Any]) -> Any:
    """Return validated parameters: what was given over the defaults.

    Args:
        owner: The pass's name, for messages.
        schema: The pass's `Parameters` dataclass.
        given: Names and raw values.

    Raises:
        ParameterError: An unknown name or a value of the wrong type or range.
    """
    if not given:
        return schema()
    valid = names(schema)
    for name in given:
        if name not in valid:
            raise ParameterError(f"{owner}: no parameter {name!r}; {nearest(name, valid)}")

    from pydantic import ValidationError

    try:
        resolved = _adapter(schema).validate_python(dict(given))
    except ValidationError as error:
        raise ParameterError(f"{owner}: {describe(error)}") from None
    for name, value in given.items():  # pydantic takes True for 1
        if isinstance(value, bool) and not isinstance(getattr(resolved, name), bool):
            raise ParameterError(f"{owner}: {name}: found {value!r}, which is not a boolean here")
    return resolved


@cache
def _adapter(schema: type) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(schema)


def describe(error: Any) -> str:
    """Return a pydantic `ValidationError` as one line: parameter, what is wrong, what was found."""
    parts = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"] if isinstance(part, str | int))
        message = item["msg"].removeprefix("Value error, ")
        found = "" if "found" in message else f", found {item['input']!r}"
        parts.append(f"{where}: {message}{found}" if where else f"{message}{found}")
    return "; ".join(parts)


def as_dict(parameters: Any) -> dict[str, Any]:
    """Return resolved parameters as plain values, which `resolve` and JSON take."""
    return {key: _plain(value) for key, value in dataclasses.asdict(parameters).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
