"""The configuration: which passes, with what parameters, and what if one cannot apply.

    version: 1                # optional
    policy: skip              # or strict
    passes:
      sync-elision: {mode: shadow}
      mlp-prefetch: {max_num_tokens: 500, gate_up_bytes: 18MiB}

Everything is checked before anything is enabled; every error names the place.
"""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from ascend_opt.base import Pass
from ascend_opt.errors import ConfigError, ParameterError, nearest
from ascend_opt.parameters import as_dict, names, resolve
from ascend_opt.states import Mode

ENVIRONMENT = "VLLM_ASCEND_OPT"
"""Carries the configuration to child processes: a YAML file, inline YAML or JSON, or `off`."""

VERSION = 1
MAX_NODES = 10_000
_COLLECTIONS = (
    yaml.resolver.Resolver.DEFAULT_MAPPING_TAG,
    yaml.resolver.Resolver.DEFAULT_SEQUENCE_TAG,
)
OPTIONS = ("allow_unknown", "mode", "targets")
"""Keys of a pass's entry that are the framework's, not the pass's parameters."""


class Policy(StrEnum):
    """What happens when a pass of the configuration cannot apply."""

    SKIP = "skip"
    STRICT = "strict"


@dataclass(frozen=True)
class Request:
    """One pass that is asked for.

    Attributes:
        name: The pass.
        parameters: Its resolved `Parameters`.
        allow_unknown: Patch sources that the pass does not recognise.
        targets: Patch only these of its targets, to find the wrong one; None for all.
        mode: Whether the pass does its work, or has it compared only.
    """

    name: str
    parameters: Any
    allow_unknown: bool = False
    targets: tuple[str, ...] | None = None
    mode: Mode = Mode.ACTIVE

    def as_plain(self) -> dict[str, Any]:
        """Return the entry as it would stand in a configuration."""
        options: dict[str, Any] = {"allow_unknown": True} if self.allow_unknown else {}
        if self.mode is not Mode.ACTIVE:
            options["mode"] = str(self.mode)
        if self.targets is not None:
            options["targets"] = list(self.targets)
        return {**options, **as_dict(self.parameters)}


@dataclass(frozen=True)
class Config:
    """A checked configuration."""

    requests: tuple[Request, ...] = ()
    policy: Policy = Policy.SKIP
    place: str = "<config>"
    off: bool = False


@dataclass
class _Places:
    """Where each key stands: path of keys to `file:line:column`; and how much there was."""

    document: str
    marks: dict[tuple[str, ...], tuple[int, int]] = field(default_factory=dict)
    nodes: int = 0

    def of(self, *path: str) -> str:
        while path and path not in self.marks:
            path = path[:-1]
        if path not in self.marks:
            return self.document
        line, column = self.marks[path]
        return f"{self.document}:{line}:{column}"


def from_environment(value: str, classes: Mapping[str, type[Pass]]) -> Config:
    """Read the value of `VLLM_ASCEND_OPT`.

    Raises:
        ConfigError: See `parse`; also a file that is not there.
    """
    text = value.strip()
    if not text:
        return Config(place=ENVIRONMENT)
    if text.lower() == "off":
        return Config(place=ENVIRONMENT, off=True)
    if text.startswith(("{", "passes:")) or "\n" in text:
        return parse(text, ENVIRONMENT, classes)
    try:
        Path(text).stat()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{ENVIRONMENT}={text[:200]!r}: {_reason(error)}; expected the path of a YAML file, "
            "inline YAML or JSON, or 'off'"
        ) from None
    return from_file(text, classes)


def from_file(path: str | os.PathLike[str], classes: Mapping[str, type[Pass]]) -> Config:
    """Read a YAML file.

    Raises:
        ConfigError: The file cannot be read; see also `parse`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the path
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {_reason(error)}") from None
    return parse(text, os.fspath(path), classes)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def parse(text: str, place: str, classes: Mapping[str, type[Pass]]) -> Config:
    """Read YAML (or JSON, which is YAML).

    Args:
        text: The document.
        place: Its name in messages.
        classes: The passes that can be named.

    Raises:
        ConfigError: Not YAML, a duplicate key, an unknown key or pass, or a value of the wrong
            type; the message begins with `place:line:column`.
    """
    places = _Places(place)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = None if node is None else _plain(node, places, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        raise ConfigError(f"{where}: not valid YAML: {error.problem}") from None
    except ConfigError:  # a ValueError, too
        raise
    except RecursionError:
        raise ConfigError(f"{place}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # PyYAML's scanner: "\UFFFFFFFF"
        message = " ".join(str(error).split())
        raise ConfigError(f"{place}: not valid YAML: {message}") from None
    return from_mapping(data, classes, places=places)


def from_mapping(
    data: object,
    classes: Mapping[str, type[Pass]],
    *,
    place: str = "<mapping>",
    places: _Places | None = None,
) -> Config:
    """Check a configuration that is already a mapping.

    Raises:
        ConfigError: See `parse`.
    """
    places = places or _Places(place)
    top = _mapping(data, places.of(), "the configuration", "'passes:'")
    _known(top, ("version", "policy", "passes"), places, (), "key")
    if type(top.get("version", VERSION)) is not int or top.get("version", VERSION) != VERSION:
        found = top["version"]
        raise ConfigError(f"{places.of('version')}: version {found!r}, expected {VERSION}")
    policy = top.get("policy", Policy.SKIP.value)
    if policy not in list(Policy):
        raise ConfigError(
            f"{places.of('policy')}: policy {policy!r}; {nearest(str(policy), list(Policy))}"
        )
    if "passes" not in top:
        raise ConfigError(f"{places.of()}: no 'passes:' in the configuration")
    entries = _mapping(top["passes"], places.of("passes"), "'passes'", "pass names")
    _known(entries, tuple(classes), places, ("passes",), "pass")
    requests = tuple(_request(name, entries[name], classes, places) for name in entries)
    return Config(requests, Policy(policy), places.document)


def _request(
    name: str, entry: object, classes: Mapping[str, type[Pass]], places: _Places
) -> Request:
    path, cls = ("passes", name), classes[name]
    given = {} if entry is None else _mapping(entry, places.of(*path), name, "parameters or {}")
    _known(given, (*OPTIONS, *names(cls.Parameters)), places, path, f"parameter of {name}")
    allow = given.get("allow_unknown", False)
    if not isinstance(allow, bool):
        where = places.of(*path, "allow_unknown")
        raise ConfigError(f"{where}: allow_unknown: found {allow!r}, expected true or false")
    try:
        mode = some_mode(cls, given.get("mode", Mode.ACTIVE), classes)
    except ParameterError as error:
        raise ConfigError(f"{places.of(*path, 'mode')}: {error}") from None
    try:
        targets = some_targets(cls, given.get("targets"), mode)
    except ParameterError as error:
        raise ConfigError(f"{places.of(*path, 'targets')}: {error}") from None
    raw = {key: value for key, value in given.items() if key not in OPTIONS}
    try:
        return Request(name, resolve(name, cls.Parameters, raw), allow, targets, mode)
    except ParameterError as error:
        message = f"{places.of(*path)}: {error}"
    for key, value in raw.items():  # one by one, so that the message names the line
        try:
            resolve(name, cls.Parameters, {key: value})
        except ParameterError as error:
            raise ConfigError(f"{places.of(*path, key)}: {error}") from None
    raise ConfigError(message)  # each is fine, they do not go together


def some_mode(cls: type[Pass], given: object, classes: Mapping[str, type[Pass]]) -> Mode:
    """Return the mode that is named.

    Args:
        cls: The pass.
        given: A name of a mode.
        classes: All passes, for the message.

    Raises:
        ParameterError: No such mode, or the pass cannot shadow.
    """
    if not isinstance(given, str) or given not in list(Mode):
        valid = nearest(str(given), list(Mode))
        raise ParameterError(f"{cls.name}: mode: found {given!r:.80}; {valid}")
    if given == Mode.SHADOW and not cls.can_shadow():
        able = [name for name, other in classes.items() if other.can_shadow()]
        raise ParameterError(
            f"{cls.name}: mode: {cls.name} cannot shadow; passes that can: "
            f"{', '.join(sorted(able)) or 'none'}"
        )
    return Mode(given)


def some_targets(
    cls: type[Pass], given: object, mode: Mode = Mode.ACTIVE
) -> tuple[str, ...] | None:
    """Return the targets of a pass that are named, in the pass's order; None if none is.

    Args:
        cls: The pass.
        given: None, a target or a list of targets.
        mode: The pass's mode; in shadow mode some targets are left alone.

    Raises:
        ParameterError: Something else, or no target of this pass in this mode.
    """
    if given is None:
        return None
    named = [given] if isinstance(given, str) else given
    valid = [str(patch.target) for patch in cls.patches if patch.applies_in(mode)]
    if not isinstance(named, list) or not named:
        raise ParameterError(
            f"{cls.name}: targets: found {given!r}, expected a list of {', '.join(valid)}"
        )
    for target in named:
        if target not in valid:
            raise ParameterError(
                f"{cls.name}: targets: no target {target!r}; {nearest(str(target), valid)}"
            )
    return tuple(target for target in valid if target in named)


def _mapping(value: object, where: str, what: str, of: str) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return value
    found = "nothing" if value is None else f"{type(value).__name__} ({reprlib.repr(value)})"
    raise ConfigError(f"{where}: {what} is {found}, expected a mapping of {of}")


def _known(
    given: Mapping[str, Any],
    valid: tuple[str, ...],
    places: _Places,
    path: tuple[str, ...],
    what: str,
) -> None:
    for key in given:
        if key not in valid:
            raise ConfigError(
                f"{places.of(*path, key)}: unknown {what} {key!r}; {nearest(key, valid)}"
            )


def _plain(node: yaml.Node, places: _Places, path: tuple[str, ...]) -> Any:
    """Return plain values of a YAML node; remember places, refuse duplicate keys."""
    mark = node.start_mark
    places.marks.setdefault(path, (mark.line + 1, mark.column + 1))
    places.nodes += 1
    if places.nodes > MAX_NODES:
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"more than {MAX_NODES} values, counting what aliases stand for",
            mark,
        )
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _COLLECTIONS:
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag!r} means nothing here", mark
        )
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, places, (*path, str(i))) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        start = key_node.start_mark
        if not isinstance(key_node, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key that is no name", start)
        key = _scalar(key_node)
        where = (*path, str(key))
        if where in places.marks:
            line, column = places.marks[where]
            raise ConfigError(
                f"{places.document}:{start.line + 1}:{start.column + 1}: duplicate key {key!r}, "
                f"first at {line}:{column}"
            )
        places.marks[where] = (start.line + 1, start.column + 1)
        result[key] = _plain(value_node, places, where)
    return result


def _scalar(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        value = loader.construct_object(node)
    except yaml.YAMLError:
        raise
    except Exception as error:  # 2024-13-99, `!!int ""`, `!!bool maybe`: not PyYAML's own errors
        message = f"{node.value!r:.60} is malformed: {error}"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None
    finally:
        loader.dispose()
    if isinstance(value, (dict, list, set)):  # `!!set a`, which PyYAML makes an empty set of
        message = f"{node.value!r:.60} is no {type(value).__name__}, as its tag {node.tag!r} says"
        raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
    if isinstance(value, str):  # JSON writes one character beyond U+FFFF as two escapes
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def dump(requests: Mapping[str, Request], policy: Policy) -> str:
    """Return the configuration as one line of JSON, for the environment of child processes."""
    passes = {name: request.as_plain() for name, request in requests.items()}
    return json.dumps({"policy": policy, "passes": passes})


def schema(classes: Mapping[str, type[Pass]]) -> dict[str, Any]:
    """Return the JSON schema of a configuration with these passes, for an editor to complete."""
    from pydantic import TypeAdapter

    entries: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    for name, cls in classes.items():
        entry = TypeAdapter(cls.Parameters).json_schema(ref_template=f"#/$defs/{name}.{{model}}")
        entry.pop("title", None)
        definitions.update({f"{name}.{k}": v for k, v in entry.pop("$defs", {}).items()})
        entry["type"] = ["object", "null"]
        entry["description"] = f"{cls.summary()} ({cls.origin})"
        entry["additionalProperties"] = False
        entry["properties"] = {
            **entry.get("properties", {}),
            "allow_unknown": {
                "type": "boolean",
                "default": False,
                "description": "patch sources that the pass does not recognise",
            },
            "mode": {
                "enum": [str(mode) for mode in Mode if mode is Mode.ACTIVE or cls.can_shadow()],
                "default": Mode.ACTIVE.value,
                "description": "shadow: the original does the work, and the pass's is compared",
            },
            "targets": {
                "type": "array",
                "minItems": 1,
                "items": {"enum": [str(patch.target) for patch in cls.patches]},
                "description": "patch only these of its targets, to find one that is wrong",
            },
        }
        entries[name] = entry
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ascend_opt configuration",
        "type": "object",
        "additionalProperties": False,
        "required": ["passes"],
        "properties": {
            "version": {"const": VERSION},
            "policy": {"enum": list(Policy), "default": Policy.SKIP.value},
            "passes": {
                "type": "object",
                "additionalProperties": False,
                "properties": entries,
            },
        },
        "$defs": definitions,
    }
