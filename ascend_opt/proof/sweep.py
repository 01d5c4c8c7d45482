"""Sweeps: the candidates and loads that a command line describes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import yaml

from ascend_opt import registry
from ascend_opt.controller import make_request
from ascend_opt.errors import AscendOptError
from ascend_opt.proof.bench import Candidate, Load
from ascend_opt.proof.runner import Requests


class SweepError(AscendOptError, ValueError):
    """A sweep that cannot be read."""


def whole_numbers(option: str, text: str) -> list[int]:
    """Read `1,8,32`.

    Raises:
        SweepError: Something else, or a number below 1.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise SweepError(f"{option} {text}: expected whole numbers from 1, such as 1,8,32")
    return list(dict.fromkeys(map(int, words)))


def loads(num_requests: str, input_len: str, output_len: int) -> tuple[Load, ...]:
    """Return every combination of requests and input lengths.

    Raises:
        SweepError: See `whole_numbers`.
    """
    requests = whole_numbers("--num-requests", num_requests)
    lengths = whole_numbers("--input-len", input_len)
    return tuple(Load(n, length, output_len) for length in lengths for n in requests)


def candidates(requests: Requests, sweeps: Sequence[str]) -> list[Candidate]:
    """Return one candidate for each combination of the swept values, or one if there are none.

    Args:
        requests: The passes that are on in all of them.
        sweeps: Each `PASS.PARAMETER=VALUE,VALUE,…`.

    Raises:
        SweepError: One has another form, or no pass is on at all.
        ParameterError: No such parameter, or a value that it does not take.
        UnknownPassError: No such pass.
    """
    axes = [_axis(text) for text in sweeps]
    found = []
    for values in itertools.product(*(axis[2] for axis in axes)):
        given: dict[str, dict[str, Any]] = {n: r.as_plain() for n, r in requests.items()}
        words = []
        for (name, parameter, _), value in zip(axes, values, strict=True):
            given.setdefault(name, {})[parameter] = _value(value)
            words.append(f"{parameter}={value}")
        made = {
            name: make_request(registry.discover().get(name), parameters)
            for name, parameters in given.items()
        }
        found.append(Candidate(" ".join(words) or ", ".join(made), made))
    return found


def _axis(text: str) -> tuple[str, str, list[str]]:
    left, equals, right = text.partition("=")
    name, dot, parameter = left.strip().rpartition(".")
    values = [value.strip() for value in right.split(",")]
    if not (equals and dot and name and parameter and all(values)):
        raise SweepError(
            f"--sweep {text}: expected PASS.PARAMETER=VALUE,VALUE,… such as "
            "mlp-prefetch.gate_up_bytes=0,4MiB,18MiB"
        )
    return name, parameter, list(dict.fromkeys(values))


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
