"""Host lists, sizes, and what a machine has."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rannd.errors import UsageError
from rannd.runner.resources import host_list
from rannd.runner.resources.host_list import Host, RankHost


def test_hosts_of_the_command_line() -> None:
    assert host_list.parse_hosts("a:4, b,c:1") == [Host("a", 4), Host("b", 1), Host("c", 1)]


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:0", "a:²", "a:9999999999", ":3", "a,,b", "a:1,a:2"])
def test_wrong_hosts(text: str) -> None:
    with pytest.raises(UsageError, match="--hosts"):
        host_list.parse_hosts(text)


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nnode1 slots = 4\n\nnode2:2  # old\nnode3\n")
    assert host_list.read_hostfile(path) == [Host("node1", 4), Host("node2", 2), Host("node3", 1)]


def test_a_host_file_from_windows(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode1\tslots=4\r\n\r\nnode2\r\n")
    assert host_list.read_hostfile(path) == [Host("node1", 4), Host("node2", 1)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("a\nb slots=many\n", ":2: 'b:many' is not a host"),
        ("a max_slots=4\n", ":1: 'max_slots=4' is not understood"),
        ("a\na\n", "named more than once"),
    ],
)
def test_a_wrong_host_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        host_list.read_hostfile(path)


def test_hosts_are_filled_in_order() -> None:
    places = host_list.place(3, [Host("a", 2), Host("b", 2)])
    assert places == [RankHost(0, "a", 0), RankHost(1, "a", 1), RankHost(2, "b", 0)]
    with pytest.raises(UsageError, match="-np 5 asks for more ranks than the hosts have slots"):
        host_list.place(5, [Host("a", 2), Host("b", 2)])


@pytest.mark.parametrize(
    ("gpus", "cores", "size"), [(8, 96, 8), (1, 4, 1), (0, 1, 1), (0, 2, 1), (0, 7, 3), (0, 64, 32)]
)
def test_default_size(gpus: int, cores: int, size: int) -> None:
    assert host_list.default_size(gpus, cores) == size


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ $1 = -L ] && for i in 0 1 2 3; do echo "GPU $i: H200 (UUID: GPU-$i)"; done\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("0", 1), ("0,2", 2), ("0,9,1", 1), ("GPU-1,MIG-2", 2), ("none", 0)],
)
def test_visible_gpus(visible: str | None, count: int) -> None:
    assert host_list.gpu_count({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


def test_a_tool_without_a_driver_means_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host_list.glob, "glob", lambda _pattern: [])
    assert host_list.gpu_count({"CUDA_VISIBLE_DEVICES": "0"}) == 0


def test_this_machine_by_its_names_and_addresses() -> None:
    own = socket.gethostname()
    assert all(host_list.is_local(name) for name in (own, "localhost", "127.0.0.1", "127.0.1.1", "::1"))
    assert not any(host_list.is_local(name) for name in ("192.0.2.1", "elsewhere", "2001:db8::1"))
    # To others this machine is not localhost.
    assert host_list.parse_hosts("localhost:2,elsewhere:1") == [Host(own, 2), Host("elsewhere", 1)]
    assert host_list.parse_hosts("localhost:2") == [Host("localhost", 2)]
    with pytest.raises(UsageError, match="named more than once"):
        host_list.parse_hosts(f"localhost:2,{own}:1,elsewhere:1")
