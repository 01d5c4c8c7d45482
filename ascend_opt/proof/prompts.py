"""The prompts that a proof runs on: a fixed set of mixed lengths, or the user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ascend_opt.errors import AscendOptError

TEXT = (
    "A harbour pilot boards each ship two miles out, where the channel narrows and the tide runs "
    "across it. She asks the master for the draught, the turning circle and the state of the "
    "engine, then watches the leading marks: while one stands above the other, the ship is on the "
    "line. At 03:40 the wind backed to the north-west, 28 knots, gusting 35; the barometer read "
    "1009.3 hPa. 'Dead slow ahead,' she said, 'and two tugs aft.' def turning_circle(length, "
    "rudder): return length * (3.2 - 0.02 * rudder). Four questions remained open, and by noon "
    "only one of them: how much water would there be over the sill at low tide, if the river went "
    "on rising as it had since Tuesday?\n"
)
"""What made prompts are cut from; nothing depends on what it says."""

LENGTHS = (1, 2, 7, 16, 17, 33, 64, 65, 127, 128, 250, 251, 400, 510)
"""Prompt lengths in tokens: around powers of two, where kernels and captured graphs change."""


class PromptError(AscendOptError, ValueError):
    """A prompt file that is not there or holds no prompts."""


def default_prompts() -> list[dict[str, int]]:
    """Return the fixed set: one prompt of each of `LENGTHS`, shorter where the model's limit is.

    All begin at another place of the text, except the last two, which share a prefix.
    """
    made = [{"tokens": length, "offset": 11 * index} for index, length in enumerate(LENGTHS)]
    made[-1]["offset"] = made[-2]["offset"]
    return made


def read_prompts(path: str) -> list[str | list[int]]:
    """Read a prompt file: one text a line or, named `.jsonl`, one JSON value a line.

    A JSON value is a text, a list of token ids, or an object with `prompt` or `prompt_token_ids`.
    Blank lines are skipped.

    Raises:
        PromptError: It cannot be read, a line is no prompt, or there is none.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PromptError(f"{path}: cannot be read: {reason}") from None
    is_json = path.endswith(".jsonl")
    found = [
        _prompt(line, f"{path}:{number}") if is_json else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise PromptError(f"{path}: no prompts; expected one a line")
    return found


def _prompt(line: str, place: str) -> str | list[int]:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{place}: not JSON: {error}") from None
    if isinstance(value, dict):
        value = value.get("prompt", value.get("prompt_token_ids"))
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return value
    raise PromptError(
        f"{place}: expected a text, a list of token ids, or an object with 'prompt' or "
        f"'prompt_token_ids', found {line.strip():.60}"
    )
