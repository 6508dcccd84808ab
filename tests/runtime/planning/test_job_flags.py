"""Settings of torch in the keys of times and plans: another one finds no older costs, the same one finds its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import nn

import pyrannc
from rannd.daemon.client.cache import Client
from rannd.daemon.common.keys import Key
from rannd.device.kernel_flags import kernel_flags
from rannd.errors import ProfileError
from rannd.profile.graph_profile import decode
from rannd.runtime.comm.world import World
from rannd.runtime.planning.job_flags import job_flags, words

matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Key]]:
    """Keys of what was stored."""
    found: list[Key] = []
    put = Client.put_many

    def noted(client: Client, items: Iterable[tuple[Key, bytes]]) -> int:
        listed = list(items)
        found.extend(key for key, _ in listed if key.kind in ("profile", "deployment", "links"))
        return put(client, listed)

    monkeypatch.setenv("RANNC_CACHE", "on")
    monkeypatch.setattr(Client, "put_many", noted)
    yield found
    matmul.fp32_precision = "none"


def run() -> None:
    pyrannc.RaNNCModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))(torch.randn(3, 4))
    pyrannc.clear()


def test_a_changed_setting_finds_no_older_costs(stored: list[Key]) -> None:
    run()
    before = set(stored)
    assert {key.kind for key in before} == {"profile", "deployment"}
    run()
    assert set(stored) == before
    matmul.fp32_precision = "bf16"
    stored.clear()
    run()
    assert len(stored) == len(before)
    assert not before & set(stored)
    assert {key.components["flag.fp32 matmul"] for key in stored} == {'"bf16"'}
    matmul.fp32_precision = "none"
    stored.clear()
    run()
    assert not stored, "the first ones are still there"


class Ranks:
    """The `World` of a rank of two, the other of which has another setting."""

    device = torch.device("cpu")

    def __init__(self, rank: int, **changed: Any) -> None:
        self.rank = rank
        self._changed = changed

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data, msgspec.msgpack.encode({**msgspec.msgpack.decode(data), **self._changed})]


def flags(**changed: Any) -> dict[str, Any]:
    return job_flags(cast(World, Ranks(0, **changed)))


def test_ranks_that_differ_are_told_and_have_keys_of_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    alike = flags()
    assert alike == kernel_flags(Ranks.device)
    assert "settings" not in capfd.readouterr().err
    differing = flags(mkldnn=False)
    assert differing == {**alike, "mkldnn": [True, False]}
    assert "mkldnn is True on rank 0, False on rank 1" in "".join(capfd.readouterr())
    assert flags(mkldnn=False, newer=1) == {**differing, "newer": [None, 1]}
    assert words(differing)["mkldnn"] == "[True, False]"


def test_times_of_other_settings_are_not_mixed_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.profile"
    monkeypatch.setenv("RANNC_GRAPH_PROFILE_FILE", str(file))
    monkeypatch.setenv("RANNC_SAVE_GRAPH_PROFILE", "true")
    run()
    assert decode(file.read_bytes()).flags["fp32 matmul"] == "none"
    try:
        matmul.fp32_precision = "bf16"
        with pytest.raises(ProfileError, match="settings of torch: fp32 matmul none, here bf16; set "):
            run()
        pyrannc.clear()
        monkeypatch.setenv("RANNC_SAVE_GRAPH_PROFILE", "false")
        monkeypatch.setenv("RANNC_LOAD_GRAPH_PROFILE", "true")
        run()
        assert "with other settings of torch: fp32 matmul none, here bf16" in "".join(capfd.readouterr())
    finally:
        matmul.fp32_precision = "none"
