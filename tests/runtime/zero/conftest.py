"""Both places to which training state can be offloaded."""

from __future__ import annotations

import pytest

from rannd.runtime.zero.host_memory import HostMemory


@pytest.fixture(params=["file", "host memory"])
def home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, or copies as to and from a device."""
    if request.param == "host memory":
        made = lambda device, folder: HostMemory(device, pinned=False)  # noqa: E731
        monkeypatch.setattr("rannd.runtime.deployment.deployer.state_home", made)
