"""Sources of the releases, or one clear reason why there are none."""

from __future__ import annotations

import os

import pytest

from ascend_opt.compat.sources import SourceUnavailableError
from compat.table import fetch_all, listed


@pytest.fixture(scope="session", autouse=True)
def sources() -> None:
    """Fetch every release once; without a registry, skip (or fail, where they are required)."""
    try:
        fetch_all(listed())
    except SourceUnavailableError as error:
        if os.environ.get("ASCEND_OPT_REQUIRE_SOURCES"):
            pytest.exit(str(error), returncode=1)
        pytest.skip(str(error))
