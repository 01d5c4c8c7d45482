"""The errors that ascend_opt raises; each says what was found, what was expected and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AscendOptError(Exception):
    """Base class of every error that ascend_opt raises on purpose."""


class UnknownPassError(AscendOptError, ValueError):
    """No installed distribution provides a pass of that name."""


class DuplicatePassError(AscendOptError, ValueError):
    """Two installed distributions provide a pass of the same name."""


class ParameterError(AscendOptError, ValueError):
    """A parameter that the pass does not have, or a value that it does not take."""


class ConfigError(AscendOptError, ValueError):
    """A configuration that cannot be read or does not follow the schema."""


class NotApplicableError(AscendOptError, RuntimeError):
    """The pass cannot be on here; the message is the reason that `status` shows."""


class PatchError(AscendOptError, RuntimeError):
    """A patch could not be applied; the target is as it was before."""


class ConflictError(PatchError):
    """Someone else has patched the target."""


class RevertError(AscendOptError, RuntimeError):
    """A patch cannot be taken out without breaking someone else's; nothing was changed."""


class RecordsError(AscendOptError, PermissionError):
    """The directory of the record files is not this user's alone, or cannot be read."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the tail of an error message: the nearest valid name and all of them.

    Args:
        name: What the user wrote.
        valid: The names that would have been accepted.
    """
    choices = sorted(map(str, valid))  # of an enumeration, too
    if not choices:
        return "there are none to choose from"
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(choices)}"
