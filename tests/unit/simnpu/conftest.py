import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.simnpu.driver_client import Driver

from ascend_opt.simnpu.build import build_driver


@pytest.fixture(scope="session")
def driver_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The built driver, in a cache of this test session's own."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc on PATH: the simulated driver cannot be built here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIMNPU_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield build_driver()


@pytest.fixture
def late(driver_directory: Path) -> Driver:
    """The driver with late delivery and nothing queued."""
    driver = Driver(driver_directory)
    assert driver.lib.aclrtSynchronizeDevice() == 0
    return driver


@pytest.fixture
def now(driver_directory: Path) -> Iterator[Driver]:
    """The driver with immediate delivery."""
    driver = Driver(driver_directory, late=False)
    yield driver
    driver.lib.simnpu_set_delivery(1)
