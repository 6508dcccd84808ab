"""systemd listens where clients look, starts this environment's daemon, and lets it do no more than it needs."""

from __future__ import annotations

import configparser
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import RANND, rannd

from rannd.daemon import systemd_units
from rannd.daemon.client.cache import connect
from rannd.daemon.common.keys import make_key
from rannd.daemon.common.paths import places
from rannd.errors import DaemonError, UsageError

SYSTEMD = Path(__file__).parents[2] / "systemd"
HARDENED = {
    "NoNewPrivileges": "yes",
    "LockPersonality": "yes",
    "RestrictRealtime": "yes",
    "RestrictSUIDSGID": "yes",
    "RestrictNamespaces": "yes",
    "RestrictAddressFamilies": "AF_UNIX",
    "SystemCallArchitectures": "native",
    "SystemCallFilter": "@system-service",
    "SystemCallErrorNumber": "EPERM",
    "PrivateNetwork": "yes",
    "ProtectSystem": "strict",
    "MemoryMax": "2G",
    "TasksMax": "64",
    "LimitNOFILE": "65536",
    "UMask": "0077",
}


def read(text: str) -> configparser.RawConfigParser:
    """A unit; no key is there twice."""
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#",), strict=True)
    parser.optionxform = str  # type: ignore[method-assign,assignment]
    parser.read_string(text)
    return parser


def words(text: str) -> list[str]:
    """Words of a unit's value, quoted as in a shell."""
    return [unescaped(word) for word in shlex.split(text)]


def unescaped(text: str) -> str:
    """%% is a percent sign; any other % would be a specifier (systemd.unit(5))."""
    assert not re.search(r"%(?!%)", text.replace("%%", ""))
    return text.replace("%%", "%")


def environment(unit: configparser.RawConfigParser) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words(unit["Service"]["Environment"]))


@pytest.fixture
def config(daemon_home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of units of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(daemon_home.conf))
    return daemon_home.conf / "systemd" / "user"


def test_the_default_cache_directory_has_the_socket_that_clients_look_for(tmp_path: Path) -> None:
    where = places({"XDG_RUNTIME_DIR": str(tmp_path), "HOME": pwd.getpwuid(os.getuid()).pw_dir})
    made = systemd_units.units(where, "/opt/rannd/bin/rannd")
    assert read(made.socket)["Socket"]["ListenStream"] == where.socket == f"{tmp_path}/rannd/v1.sock"
    unit = read(made.service)
    assert unit["Service"]["ExecStart"] == '"/opt/rannd/bin/rannd" run'
    assert places(environment(unit)) == where, "the daemon finds the same places"
    assert words(unit["Service"]["ReadWritePaths"]) == [f"{tmp_path}/rannd", os.path.dirname(where.cache)]


_NO_QUOTES = str.maketrans("", "", "\"'\\")


def program(folder: Path) -> str:
    """Something that could be started."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rannd").touch(0o755)
    return str(folder / "rannd")


@pytest.mark.parametrize("name", ["ca che", "50%h", 'a"b', "a\\b", "it's", "$HOME", "héhé", "x" * 150])
def test_any_directory_is_expressed(tmp_path: Path, name: str) -> None:
    runtime = tmp_path / name
    runtime.mkdir()
    where = places({"XDG_RUNTIME_DIR": str(runtime), "XDG_CACHE_HOME": f"{tmp_path}/cache {name}"})
    made = systemd_units.units(where, program(tmp_path / "bin" / name.translate(_NO_QUOTES)))
    unit = read(made.service)
    assert unescaped(read(made.socket)["Socket"]["ListenStream"]) == where.socket
    assert places(environment(unit)) == where
    writable = words(unit["Service"]["ReadWritePaths"])
    for path in (where.socket, where.life, where.store):
        assert any(path.startswith(f"{folder}/") for folder in writable), path
    _verify(made, tmp_path)


def test_what_a_unit_cannot_express_is_refused(tmp_path: Path) -> None:
    for name in ("line\nfeed", "\udcff", "bell\x07"):
        (tmp_path / name).mkdir()
        with pytest.raises(DaemonError, match=r"cannot contain the path|not in UTF-8"):
            systemd_units.units(places({"XDG_RUNTIME_DIR": str(tmp_path / name), "HOME": "/home/me"}), "/bin/rannd")
        with pytest.raises(DaemonError, match=r"cannot contain the path|not in UTF-8"):
            systemd_units.units(places({"XDG_RUNTIME_DIR": str(tmp_path), "HOME": f"/home/{name}"}), "/bin/rannd")
    with pytest.raises(DaemonError, match="quotes or backslashes"):
        systemd_units.units(places({"XDG_RUNTIME_DIR": str(tmp_path), "HOME": "/home/me"}), "/it's/rannd")


def test_without_a_runtime_directory_it_is_refused() -> None:
    """As after su: systemd's user manager would set the variable for the daemon, clients would not have it."""
    with pytest.raises(DaemonError, match="XDG_RUNTIME_DIR is not a directory of this user"):
        systemd_units.units(places({"HOME": "/home/me"}), "/bin/rannd")


def test_the_sample_units_are_those_of_the_source() -> None:
    for name, text in systemd_units.sample().files().items():
        assert (SYSTEMD / name).read_text() == text


@pytest.mark.parametrize("kind", ["sample", "installed"])
def test_the_service_may_do_no_more_than_it_needs(daemon_home, kind: str) -> None:
    made = systemd_units.sample() if kind == "sample" else systemd_units.units(places(), "/opt/rannd")
    told = dict(read(made.service)["Service"])
    assert {name: told.get(name) for name in HARDENED} == HARDENED
    places_keys = {"CacheDirectory", "CacheDirectoryMode", "ReadWritePaths", "Environment"}
    assert set(told) - set(HARDENED) - places_keys == {"ExecStart", "KillMode"}
    assert dict(read(made.socket)["Socket"]) | {"ListenStream": ""} == {
        "ListenStream": "",
        "SocketMode": "0600",
        "DirectoryMode": "0700",
        "RemoveOnStop": "yes",
    }


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze: its keys are tested above")
@pytest.mark.parametrize("kind", ["sample", "installed"])
def test_systemd_finds_nothing_wrong(daemon_home, kind: str, tmp_path: Path) -> None:
    made = systemd_units.sample() if kind == "sample" else systemd_units.units(places(), RANND)
    if kind == "sample":
        made = systemd_units.Units(made.socket, made.service.replace("%h/.local/bin/rannd", program(tmp_path)))
    _verify(made, tmp_path)


def _verify(made: systemd_units.Units, folder: Path) -> None:
    """What `systemd-analyze verify` says to units: nothing, where it is installed."""
    if shutil.which("systemd-analyze") is None:
        return
    for name, content in made.files().items():
        (folder / name).write_text(content)
    said = subprocess.run(
        ["systemd-analyze", "--user", "verify", *(folder / name for name in made.files())],
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert said.returncode == 0, said.stderr
    assert "rannd." not in said.stderr, "it only warns of unknown keys and values"


def test_systemd_would_find_something_wrong(daemon_home, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    made = systemd_units.units(places(), RANND)
    with pytest.raises(AssertionError, match="Unknown key"):
        _verify(systemd_units.Units(made.socket, made.service + "NoSuchKey=1\n"), tmp_path)


def test_install(config: Path, daemon_home) -> None:
    told = rannd("install-service")
    assert told.returncode == 0, told.stderr
    assert sorted(file.name for file in config.iterdir()) == ["rannd.service", "rannd.socket"]
    lines = told.stdout.splitlines()
    assert lines[:2] == [f"wrote {config}/rannd.socket", f"wrote {config}/rannd.service"]
    assert "  systemctl --user daemon-reload" in lines
    assert "  systemctl --user enable --now rannd.socket" in lines
    assert f"  rm {config}/rannd.socket {config}/rannd.service" in lines
    assert read((config / "rannd.socket").read_text())["Socket"]["ListenStream"] == places().socket
    assert words(read((config / "rannd.service").read_text())["Service"]["ExecStart"]) == [RANND, "run"]
    assert Path(places().cache).is_dir(), "the service could not make it"
    again = rannd("install-service").stdout.splitlines()
    assert again[:2] == [f"{config}/rannd.socket is up to date", f"{config}/rannd.service is up to date"]
    assert daemon_home.pids() == [], "nothing is started"


def test_print_writes_nothing(config: Path) -> None:
    told = rannd("install-service", "--print").stdout
    assert not config.exists()
    for name in ("rannd.socket", "rannd.service"):
        assert f"# {config}/{name}\n# Written by" in told
    assert f"ListenStream={places().socket}\n" in told


def test_a_unit_that_says_something_else_stays(config: Path) -> None:
    config.mkdir(parents=True)
    (config / "rannd.service").write_text("mine")
    told = rannd("install-service")
    assert told.returncode == 2
    assert f"{config}/rannd.service exists with other content" in told.stderr
    assert not (config / "rannd.socket").exists()
    assert (config / "rannd.service").read_text() == "mine"
    forced = rannd("install-service", "--force")
    assert forced.returncode == 0
    assert "Written by" in (config / "rannd.service").read_text()


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_link_is_not_written_through(config: Path, daemon_home, force: tuple[str, ...]) -> None:
    config.mkdir(parents=True)
    other = daemon_home.base / "other"
    other.write_text("other")
    (config / "rannd.socket").symlink_to(other)
    told = rannd("install-service", *force)
    assert told.returncode == 6
    assert "symbolic link" in told.stderr
    assert other.read_text() == "other"
    assert not (config / "rannd.service").exists()


def test_a_folder_that_cannot_be_made(config: Path, daemon_home) -> None:
    (daemon_home.conf / "systemd").write_text("in the way")
    told = rannd("install-service")
    assert told.returncode == 6
    assert f"the folder {config} cannot be created" in told.stderr


def test_half_of_the_units_is_completed(tmp_path: Path) -> None:
    made = systemd_units.sample()
    assert systemd_units.install(made, tmp_path / "a", force=False) == {
        tmp_path / "a" / "rannd.socket": True,
        tmp_path / "a" / "rannd.service": True,
    }
    (tmp_path / "a" / "rannd.socket").unlink()
    written = systemd_units.install(made, tmp_path / "a", force=False)
    assert [file.name for file, new in written.items() if new] == ["rannd.socket"]
    (tmp_path / "a" / "rannd.socket").write_text("other")
    with pytest.raises(UsageError, match="--force"):
        systemd_units.install(made, tmp_path / "a", force=False)


def test_where_units_are() -> None:
    assert systemd_units.directory({"XDG_CONFIG_HOME": "/c", "HOME": "/h"}) == Path("/c/systemd/user")
    assert systemd_units.directory({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}) == Path("/h/.config/systemd/user")
    with pytest.raises(DaemonError, match="set HOME"):
        systemd_units.directory({})


def test_the_executable_is_that_of_this_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert systemd_units.executable() == RANND
    mine = tmp_path / "rannd"
    monkeypatch.setattr(sys, "argv", [str(mine)])
    assert systemd_units.executable() == RANND, "there is none"
    mine.touch(0o755)
    assert systemd_units.executable() == str(mine), "the one that runs"


SYSTEMD_STARTS = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_the_installed_units_serve_a_client(config: Path, daemon_home) -> None:
    """As systemd does it: listen as one unit says, start what the other says, with its variables alone."""
    rannd("install-service")
    listen = read((config / "rannd.socket").read_text())["Socket"]["ListenStream"]
    unit = read((config / "rannd.service").read_text())
    places().secure_runtime()
    key = make_key("trace", {"x": 1})
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(listen)
        listener.listen(16)
        program = [
            *(sys.executable, "-c", SYSTEMD_STARTS, str(listener.fileno())),
            *words(unit["Service"]["ExecStart"]),
        ]
        manager = {"HOME": "/nonexistent", "PATH": os.environ["PATH"]}
        kept = {name: os.environ[name] for name in ("PYTHONPATH", "RANNC_CONF_DIR") if name in os.environ}
        with subprocess.Popen(
            program, pass_fds=[listener.fileno()], env={**manager, **kept, **environment(unit)}
        ) as daemon:
            try:
                with connect(mode="on", timeout_s=120, idle_s=600, max_bytes=1 << 30) as client:
                    assert client.put(key, b"x")
                    assert client.get(key) == b"x"
                assert daemon_home.pids() == [daemon.pid]
            finally:
                daemon.terminate()
            assert daemon.wait() == 0
        assert Path(places().store).is_file()
        assert Path(listen).exists(), "the socket is systemd's"


def test_status_does_not_wake_the_daemon(daemon_home) -> None:
    where = places()
    where.secure_runtime()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where.socket)
        listener.listen(16)
        listener.setblocking(False)
        assert rannd("status").returncode == 3
        assert rannd("status", "--prometheus").stdout.endswith("rannd_up 0\n")
        with pytest.raises(BlockingIOError):
            listener.accept()
