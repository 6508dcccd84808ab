"""Where things are, and who may be there."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from rannd.daemon.common import paths
from rannd.daemon.store import filesystem
from rannd.errors import DaemonError


def found(runtime: Path, cache: Path) -> paths.DaemonPaths:
    return paths.places({"XDG_RUNTIME_DIR": str(runtime), "XDG_CACHE_HOME": str(cache), "HOME": "/nowhere"})


def test_everything_is_below_the_two_directories(tmp_path: Path) -> None:
    here = found(tmp_path, tmp_path / "c")
    assert here.runtime == f"{tmp_path}/rannd"
    assert here.cache == f"{tmp_path}/c/rannd/{paths.machine_id()}"
    assert all(path.startswith(str(tmp_path)) for path in (here.life, here.use, here.spawn, here.store, here.log))
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"


def test_another_cache_directory_is_another_daemon(tmp_path: Path) -> None:
    assert found(tmp_path, tmp_path / "a").socket != found(tmp_path, tmp_path / "b").socket


def test_the_accounts_own_cache_has_the_name_the_systemd_unit_listens_at(tmp_path: Path) -> None:
    home = pwd.getpwuid(os.getuid()).pw_dir
    here = paths.places({"XDG_RUNTIME_DIR": str(tmp_path), "HOME": home})
    unit = Path(__file__).parents[3] / "systemd" / "rannd.socket"
    assert f"ListenStream={here.socket.replace(str(tmp_path), '%t')}\n" in unit.read_text()


@pytest.mark.parametrize("runtime", ["", "relative/run", "/nowhere/run", "/proc/1/status"])
def test_without_a_runtime_directory_of_ones_own_it_is_in_tmp(runtime: str, tmp_path: Path) -> None:
    here = paths.places({"XDG_RUNTIME_DIR": runtime, "XDG_CACHE_HOME": str(tmp_path)})
    assert here.runtime == f"/tmp/rannd-{os.getuid()}"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_runtime_directory_is_not_used(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    assert found(tmp_path, tmp_path).runtime == "/tmp/rannd-0"


def test_long_paths_are_shortened_by_hash(tmp_path: Path) -> None:
    one, other = tmp_path / ("x" * 120), tmp_path / ("y" * 120)
    sockets = set()
    for runtime in (one, other):
        runtime.mkdir()
        here = found(runtime, tmp_path)
        assert len(here.socket) <= paths.MAX_SOCKET_PATH
        assert here.socket.startswith(f"/tmp/rannd-{os.getuid()}/")
        assert here.life.startswith(str(runtime)), "only the socket has a limit"
        sockets.add(here.socket)
    assert len(sockets) == 2


def test_the_cache_follows_home_and_ignores_relative_names() -> None:
    assert paths.places({"HOME": "/home/x", "XDG_CACHE_HOME": "c"}).cache.startswith("/home/x/.cache/rannd/")


def test_machines_are_told_apart_without_telling_their_id(tmp_path: Path) -> None:
    secret = "3d1219c7c4c5404aaa1f6d2a48adfda4"
    one, other, empty = tmp_path / "one", tmp_path / "other", tmp_path / "empty"
    one.write_text(secret + "\n")
    other.write_text("0" * 32)
    empty.write_text("")
    names = {paths.machine_id(str(path)) for path in (one, other, empty)}
    assert len(names) == 3
    assert paths.machine_id(str(empty)) == paths.machine_id(str(tmp_path / "missing"))
    assert not any(secret[:8] in name for name in names)


def test_directories_are_made_private(tmp_path: Path) -> None:
    here = found(tmp_path, tmp_path / "c")
    here.secure_runtime()
    here.secure_cache()
    here.secure_runtime()
    for directory in (here.runtime, here.cache):
        assert os.stat(directory).st_mode & 0o777 == 0o700


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "rannd").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DaemonError, match="symbolic link"):
        found(tmp_path, tmp_path).secure_runtime()


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rannd").write_text("")
    with pytest.raises(DaemonError, match="not a directory"):
        found(tmp_path, tmp_path).secure_runtime()


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_an_open_runtime_directory_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "rannd").mkdir()
    (tmp_path / "rannd").chmod(mode)
    with pytest.raises(DaemonError, match=f"{mode:04o}.*chmod 700"):
        found(tmp_path, tmp_path).secure_runtime()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rannd").mkdir(mode=0o700)
    os.chown(tmp_path / "rannd", 12345, 12345)
    with pytest.raises(DaemonError, match="belongs to user 12345"):
        found(tmp_path, tmp_path / "c").secure_runtime()
    with pytest.raises(DaemonError, match="belongs to user 12345"):
        found(tmp_path / "r", tmp_path).secure_cache()


def test_a_cache_others_may_write_to_is_refused_a_readable_one_is_not(tmp_path: Path) -> None:
    here = found(tmp_path, tmp_path / "c")
    here.secure_cache()
    os.chmod(here.cache, 0o755)
    here.secure_cache()
    os.chmod(here.cache, 0o777)
    with pytest.raises(DaemonError, match="0777"):
        here.secure_cache()


def test_a_cache_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DaemonError, match=r"File exists: .*/file"):
        found(tmp_path, tmp_path / "file").secure_cache()


def test_network_filesystems_are_known() -> None:
    assert all(map(filesystem.is_network, ("nfs4", "lustre", "gpfs", "fuse", "fuse.sshfs", "fuseblk", "cifs")))
    assert not any(map(filesystem.is_network, ("ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs")))


def test_the_filesystem_of_a_file_is_that_of_its_mount() -> None:
    assert not filesystem.on_network("/proc/self/status")
