"""Configurations: good ones are read, bad ones are refused with the place, and nothing else."""

import enum
import json
import os
import threading
from dataclasses import dataclass
from typing import Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_opt import ByteSize, ConfigError, Mode, Pass, host_patch, shadow_of
from ascend_opt.config import (
    ENVIRONMENT,
    Policy,
    Request,
    dump,
    from_environment,
    from_file,
    from_mapping,
    parse,
    schema,
)


class Where(enum.Enum):
    GRAPH = "graph"
    EAGER = "eager"


@dataclass(frozen=True)
class Parameters:
    limit: int = 500
    size: ByteSize = 18 * 1024**2
    where: Where = Where.GRAPH
    kind: Literal["one", "two"] = "one"
    flag: bool = False
    ratio: float = 0.5
    note: str = ""
    low: int = 1
    high: int = 5

    def __post_init__(self):
        if self.low > self.high:
            raise ValueError("low is above high")
        if self.limit < 0:
            raise ValueError("limit must not be negative")


class Fast(Pass):
    """Be fast."""

    name = "fast"
    origin = "test"
    remove_when = "never"
    Parameters = Parameters

    @host_patch("m:f", known={})
    def patch(self, wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    @host_patch("m:g", known={})
    def other(self, wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    @shadow_of(patch)
    def compare(self, instance, args, kwargs):
        yield


class Plain(Pass):
    """Be plain."""

    name = "plain"
    origin = "test"
    remove_when = "never"


CLASSES = {"fast": Fast, "plain": Plain}


def read(text):
    return parse(text, "c.yaml", CLASSES)


def test_a_full_configuration():
    """Policy, passes with and without parameters, sizes with units, options of the framework."""
    found = read(
        "version: 1\npolicy: strict\npasses:\n  plain:\n"
        "  fast: {limit: 3, size: 1.5 KiB, where: eager, allow_unknown: true}\n"
    )

    plain, fast = found.requests
    assert found.policy is Policy.STRICT
    assert (plain.name, plain.allow_unknown) == ("plain", False)
    assert (fast.parameters.limit, fast.parameters.size) == (3, 1536)
    assert fast.parameters.where is Where.EAGER
    assert fast.allow_unknown


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("passes:\n  fst: {}\n", "2:3", "unknown pass 'fst'; did you mean 'fast'"),
        ("passes:\n  fast:\n    limitt: 1\n", "3:5", "did you mean 'limit'"),
        ("polcy: skip\npasses: {}\n", "1:1", "unknown key 'polcy'; did you mean 'policy'"),
        ("passes:\n  fast:\n    limit: many\n", "3:5", "limit"),
        ("passes:\n  fast:\n    limit: true\n", "3:5", "found True"),
        ("passes:\n  fast:\n    ratio: false\n", "3:5", "found False"),
        ("passes:\n  fast:\n    size: true\n", "3:5", "found True"),
        ("passes:\n  fast:\n    size: 18XB\n", "3:5", "found '18XB', expected a number of bytes"),
        ("passes:\n  fast:\n    size: -1\n", "3:5", "cannot be negative"),
        ("passes:\n  fast:\n    size: -1MiB\n", "3:5", "found '-1MiB'"),
        ("passes:\n  fast:\n    size: 1.5\n", "3:5", "found 1.5"),
        ("passes:\n  fast:\n    limit: -1\n", "3:5", "must not be negative"),
        ("passes:\n  fast:\n    limit: [1]\n", "3:5", "limit"),
        ("passes:\n  fast:\n    kind: off\n", "3:5", "kind"),
        ("passes:\n  fast:\n    mode: shdow\n", "3:5", "found 'shdow'; did you mean 'shadow'"),
        ("passes:\n  fast:\n    mode: off\n", "3:5", "found False; valid: active, shadow"),
        ("passes:\n  fast: {mode: shadow, targets: [m:g]}\n", "2:24", "no target 'm:g'"),
        ("passes:\n  plain: {limit: 1, mode: shadow}\n", "2:11", "unknown parameter of plain"),
        (
            "passes:\n  plain:\n    mode: shadow\n",
            "3:5",
            "plain cannot shadow; passes that can: fast",
        ),
        ("passes:\n  fast:\n    low: 7\n", "3:5", "low is above high"),
        ("passes:\n  fast: {low: 9, high: 8}\n", "2:10", "low is above high"),
        ("passes:\n  fast:\n    allow_unknown: 1\n", "3:5", "expected true or false"),
        ("passes:\n  fast: 3\n", "2:3", "expected a mapping of parameters"),
        ("passes:\n  fast: {}\n  fast: {}\n", "3:3", "duplicate key 'fast', first at 2:3"),
        ("passes: {}\npasses: {}\n", "2:1", "duplicate key"),
        ("passes:\n  fast: {limit: 1, limit: 2}\n", "2:20", "duplicate key 'limit'"),
        ("passes:\n  - fast\n", "1:1", "'passes' is list"),
        ("passes:\n", "1:1", "'passes' is nothing"),
        ("policy: loud\npasses: {}\n", "1:1", "valid: skip, strict"),
        ("policy: [skip]\npasses: {}\n", "1:1", "policy"),
        ("version: 2\npasses: {}\n", "1:1", "version 2, expected 1"),
        ("version: true\npasses: {}\n", "1:1", "version True, expected 1"),
        ("policy: skip\n", "1:1", "no 'passes:'"),
        ("- passes\n", "1:1", "the configuration is list"),
        ("just text\n", "1:1", "the configuration is str"),
        ("passes: {fast: {limit: 1}\n", "2:1", "not valid YAML"),
        ("passes:\n\tfast: {}\n", "2:1", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "2:1", "not valid YAML"),
        ("passes: !!python/object:os.system {}\n", "1:9", "means nothing here"),
        ("passes:\n  fast: {limit: !!int ''}\n", "2:17", "not valid YAML"),
        ("passes:\n  fast: {flag: !!bool maybe}\n", "2:16", "not valid YAML"),
        ("passes:\n  fast: {note: 2024-13-99}\n", "2:16", "not valid YAML"),
        ("? [a, b]\n: 1\n", "1:3", "a key that is no name"),
        ("1: 2\npasses: {}\n", "1:1", "expected a mapping"),
        ("passes: {fast: {note: *gone}}\n", "1:23", "undefined alias"),
    ],
)
def test_a_bad_configuration_is_refused_at_its_place(text, place, message):
    """ConfigError begins with `file:line:column` and says what was found and what is valid."""
    with pytest.raises(ConfigError) as caught:
        read(text)

    assert str(caught.value).startswith(f"c.yaml:{place}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n"])
def test_an_empty_configuration_is_refused(text):
    """An empty file is a mistake, not a configuration of nothing."""
    with pytest.raises(ConfigError, match=r"c\.yaml.*is nothing, expected a mapping of 'passes:'"):
        read(text)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        BOMB.replace("[", "{k: [").replace("]", "]}"),
        BOMB + "passes: *i\n",
        "passes: &a\n  fast: *a\n",
        "passes: {fast: {note: &a [*a]}}\n",
        "passes: " + "[" * 1500,
        "passes: " + "{a: " * 1500,
        "passes: " + "[" * 400 + "]" * 400,
        "passes: {fast: {note: [" + "1," * 11000 + "]}}\n",
        'passes: {fast: {note: "\\UFFFFFFFF"}}\n',
    ],
    ids=[
        "list bomb",
        "map bomb",
        "used",
        "cycle",
        "list cycle",
        "open",
        "maps",
        "deep",
        "long",
        "U",
    ],
)
def test_a_hostile_document_is_refused_quickly(text):
    """Alias bombs, cycles, deep nesting: a ConfigError, not a hang, whatever they expand to."""
    outcome = []

    def attempt():
        try:
            read(text)
        except ConfigError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(60)

    assert len(outcome) == 1
    assert len(outcome[0]) < 500


@pytest.mark.parametrize("tag", ["set", "seq", "map"])
@pytest.mark.parametrize(
    "text", ["{tag} passes: ", "passes: {tag} fast", "passes: {{{tag} fast: }}"]
)
def test_a_word_that_is_tagged_as_a_collection_is_refused(tag, text):
    """As a key and as a value; PyYAML would make an empty collection of it, and lose the word."""
    with pytest.raises(ConfigError, match=r"c\.yaml:1:\d+: .* is no (set|list|dict), as its tag"):
        read(text.format(tag=f"!!{tag}"))


def test_an_anchor_may_be_used():
    """Aliases are YAML; only their abuse is refused."""
    found = read("passes:\n  fast: {low: &n 2, high: *n}\n")

    assert (found.requests[0].parameters.low, found.requests[0].parameters.high) == (2, 2)


def test_values_that_go_together_are_checked_together():
    """Each alone would clash with a default; as given they are fine."""
    (request,) = read("passes:\n  fast: {low: 10, high: 20}\n").requests

    assert (request.parameters.low, request.parameters.high) == (10, 20)


@pytest.mark.parametrize("mode", ["missing", "directory", "binary", "latin-1", "null"])
def test_an_unreadable_file_is_refused_by_name(tmp_path, mode):
    """Missing, a directory, not UTF-8, a path that cannot be: ConfigError names the file."""
    path = tmp_path / "c.yaml"
    if mode == "directory":
        path.mkdir()
    elif mode == "binary":
        path.write_bytes(bytes(range(256)))
    elif mode == "latin-1":
        path.write_bytes("passes: {} # é".encode("latin-1"))
    name = f"{path}\0" if mode == "null" else str(path)

    with pytest.raises(ConfigError, match=r"c\.yaml.*: cannot be read: "):
        from_file(name, CLASSES)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    """The reason is the system's own."""
    path = tmp_path / "c.yaml"
    path.touch(0)

    with pytest.raises(ConfigError, match="Permission denied"):
        from_file(path, CLASSES)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_variable_asks_for_nothing(text):
    """As if it were not set."""
    assert from_environment(text, CLASSES).requests == ()


@pytest.mark.parametrize("text", ["off", "OFF", " off "])
def test_off_means_off(text):
    """Whatever its case."""
    assert from_environment(text, CLASSES).off


@pytest.mark.parametrize(
    "text",
    [
        "passes: {fast: {limit: 7}}",
        "policy: skip\npasses:\n  fast:\n    limit: 7\n",
        '{"passes": {"fast": {"limit": 7}}}',
        "{passes: {fast: {limit: 7}}}",
        " \n  passes: {fast: {limit: 7}}",
    ],
)
def test_the_variable_takes_inline_yaml_and_json(text):
    """One line or several."""
    (request,) = from_environment(text, CLASSES).requests

    assert request.parameters.limit == 7


def test_the_variable_takes_a_path(tmp_path):
    """And messages name the file, not the variable."""
    path = tmp_path / "c.yaml"
    path.write_text("passes: {fast: {limit: 7}}")
    assert from_environment(str(path), CLASSES).requests[0].parameters.limit == 7
    path.write_text("passes: {fst: {}}")

    with pytest.raises(ConfigError, match=r"c\.yaml:1:10: unknown pass"):
        from_environment(str(path), CLASSES)


@pytest.mark.parametrize("text", ["/no/such/file.yaml", "x" * 5000, "sync-elision", "a\0b"])
def test_a_variable_that_is_nothing_of_the_kind_says_what_it_may_be(text):
    """The error names the variable, the system's reason and the three forms."""
    with pytest.raises(ConfigError, match=rf"^{ENVIRONMENT}=.*expected the path of a YAML file"):
        from_environment(text, CLASSES)


def request(option=Mode.ACTIVE, **parameters):
    return Request("fast", Parameters(**parameters), allow_unknown=True, mode=option)


@pytest.mark.parametrize("policy", list(Policy))
@given(
    st.builds(
        request,
        option=st.sampled_from(Mode),
        limit=st.integers(0),
        size=st.integers(0),
        where=st.sampled_from(Where),
        flag=st.booleans(),
        ratio=st.floats(allow_nan=False),
        note=st.text(st.characters(exclude_categories=["Cs"])),
    )
)
def test_what_is_handed_to_children_reads_back_the_same(policy, asked):
    """`dump` then `from_environment` is the identity, for every parameter type."""
    found = from_environment(dump({"fast": asked}, policy), CLASSES)

    assert found.requests == (asked,)
    assert found.policy is policy


def test_what_is_handed_to_children_is_one_line():
    """It must survive shells, Ray and `env` files."""
    assert "\n" not in dump({"fast": request(note="a\nb")}, Policy.SKIP)


GOOD = [
    {"passes": {}},
    {"version": 1, "policy": "strict", "passes": {"plain": None, "fast": {}}},
    {"passes": {"fast": {"limit": 3, "size": "18 MiB", "where": "eager", "allow_unknown": True}}},
    {"passes": {"fast": {"size": 5, "flag": True, "ratio": 1, "kind": "two"}}},
    {"passes": {"fast": {"mode": "shadow"}, "plain": {"mode": "active"}}},
]
BAD = [
    {},
    [],
    {"passes": []},
    {"passes": {"fst": {}}},
    {"passes": {"fast": {"limt": 1}}},
    {"passes": {"fast": {"limit": "many"}}},
    {"passes": {"fast": {"limit": True}}},
    {"passes": {"fast": {"size": "18XB"}}},
    {"passes": {"fast": {"size": "18k"}}},
    {"passes": {"fast": {"size": "18Mi"}}},
    {"passes": {"fast": {"size": -1}}},
    {"passes": {"fast": {"where": "nowhere"}}},
    {"passes": {"fast": {"allow_unknown": 1}}},
    {"passes": {"plain": {"limit": 1}}},
    {"passes": {"plain": {"mode": "shadow"}}},
    {"passes": {"fast": {"mode": "off"}}},
    {"policy": "loud", "passes": {}},
    {"version": 2, "passes": {}},
]


def valid(data):
    try:
        from_mapping(data, CLASSES)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("data", GOOD, ids=json.dumps)
def test_the_schema_accepts_what_the_reader_accepts(data):
    """Good configurations validate, enumerations and sizes included."""
    jsonschema.Draft202012Validator.check_schema(schema(CLASSES))
    jsonschema.validate(data, schema(CLASSES))

    assert valid(data)


@pytest.mark.parametrize("data", BAD, ids=json.dumps)
def test_the_schema_refuses_what_the_reader_refuses(data):
    """Bad configurations do not validate."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, schema(CLASSES))

    assert not valid(data)


NAMES = ["passes", "policy", "version", "fast", "plain", "limit", "size", "where", "off", "strict"]
SCALARS = ["18MiB", "-1", "1", "true", "null", "2024-01-01", "0x1g", "1e999", ".nan", "~", "="]
SYNTAX = ["&a", "*a", "<<", "!!set", "!!int", "!!binary", "!!float", "!!timestamp", "---", "..."]
ODD = ["\u2028", "\x85", "\ufeff", "\x00", "\ud800", "\U0001f600", *"{}[]:,-?|>&*!%@`'\"#\\"]
WORDS = st.sampled_from([*NAMES, *SCALARS, *SYNTAX, *ODD])
DOCUMENTS = st.lists(
    st.tuples(WORDS, st.sampled_from(["", " ", "\n", "\n  ", ": ", ":\n    ", "\t"])), max_size=25
).map(lambda parts: "".join(word + gap for word, gap in parts))


@pytest.mark.parametrize("function", [lambda t: read(t), lambda t: from_environment(t, CLASSES)])
@given(DOCUMENTS | st.text(max_size=60))
@settings(max_examples=1000, deadline=None)
def test_no_text_whatever_raises_anything_but_config_error(function, text):
    """Fuzz: text either is a configuration or a ConfigError."""
    try:
        found = function(text)
    except ConfigError:
        return
    assert all(request.name in CLASSES for request in found.requests)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
ENTRIES = st.dictionaries(
    st.sampled_from(
        ["limit", "size", "where", "flag", "ratio", "note", "kind", "mode", "allow_unknown"]
    ),
    VALUES,
)


@given(
    st.fixed_dictionaries({"passes": st.fixed_dictionaries({"fast": ENTRIES | VALUES})}) | VALUES
)
@settings(max_examples=600, deadline=None)
def test_no_mapping_whatever_raises_anything_but_config_error(data):
    """Fuzz of values: whatever is accepted has the parameter types it declares."""
    try:
        found = from_mapping(data, CLASSES)
    except ConfigError:
        return
    for asked in found.requests:
        assert type(asked.parameters.limit) is int
        assert type(asked.parameters.size) is int
        assert asked.parameters.size >= 0
        assert type(asked.parameters.flag) is bool
        assert asked.mode in Mode
