"""Parameters: validated once, described in one line."""

import json
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascend_opt import ByteSize, ParameterError
from ascend_opt.parameters import NoParameters, as_dict, parse_bytes, resolve


class Where(Enum):
    HERE = "here"


@dataclass(frozen=True)
class Parameters:
    limit: int = 500
    size: ByteSize = 0
    flag: bool = False
    where: Where = Where.HERE
    many: tuple[int, ...] = (1, 2)
    table: dict[str, int] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (5, 5),
        ("5", 5),
        ("5B", 5),
        ("18MiB", 18 * 1024**2),
        ("18 mib", 18 * 1024**2),
        (" 1.5KiB ", 1536),
        ("1kB", 1000),
        ("1GB", 10**9),
        ("2TiB", 2 * 1024**4),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(given, expected):
    """Bytes, decimal and binary units, any case, exact beyond a float's precision."""
    assert parse_bytes(given) == expected


NUMBERS = [-1, True, None, 1.5, []]
TEXTS = ["-1", "-1MiB", "18XB", "MiB", "", "1 2", "1..5MiB", "0x10", "9" * 400, "1e5", "inf", "nan"]


@pytest.mark.parametrize("bad", [*NUMBERS, *TEXTS, "18Mi", "18M", "\u0661MiB"])
def test_what_is_no_size(bad):
    """ValueError, whatever it is."""
    with pytest.raises(ValueError, match=r"found|negative"):
        parse_bytes(bad)


@given(st.integers(0, 2**70), st.sampled_from(["", "B", "KiB", "GB"]))
def test_sizes_are_exact(number, unit):
    """No rounding for whole numbers."""
    factor = {"": 1, "B": 1, "KiB": 1024, "GB": 10**9}[unit]

    assert parse_bytes(f"{number}{unit}") == Fraction(number) * factor


def test_given_values_go_over_the_defaults():
    """And the rest stays."""
    assert resolve("p", Parameters, {"limit": 3}) == Parameters(limit=3)


def test_the_nearest_name_is_suggested():
    """With all of them."""
    with pytest.raises(ParameterError, match=r"p: no parameter 'limt'; did you mean 'limit'\? va"):
        resolve("p", Parameters, {"limt": 3})


def test_a_pass_without_parameters_takes_none():
    """And says so."""
    with pytest.raises(ParameterError, match="there are none to choose from"):
        resolve("p", NoParameters, {"limit": 3})


@pytest.mark.parametrize(
    "given",
    [
        {"limit": "many"},
        {"limit": True},
        {"limit": None},
        {"limit": 1.5},
        {"size": False},
        {"flag": 3},
        {"where": "there"},
        {"many": ["x"]},
        {"table": {"a": "x"}},
    ],
)
def test_a_wrong_value_names_parameter_and_value(given):
    """One line: whose, which, what was found."""
    (name,) = given

    with pytest.raises(ParameterError) as caught:
        resolve("p", Parameters, given)

    message = str(caught.value)
    assert message.startswith(f"p: {name}")
    assert "\n" not in message
    assert "found" in message


def test_plain_values_are_json_and_resolve_back():
    """Enumerations, tuples, mappings: what `status` shows can be given again."""
    given = Parameters(limit=1, many=(3,), table={"a": 1})

    plain = json.loads(json.dumps(as_dict(given)))

    assert plain["where"] == "here"
    assert resolve("p", Parameters, plain) == given
