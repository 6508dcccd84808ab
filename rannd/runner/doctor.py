"""`rannc-run --check`: checks all that a job needs, tries it with two ranks, and says what to fix."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import rannd.config
from rannd import __version__
from rannd.config import Config
from rannd.errors import LaunchError, RanndError
from rannd.ranks.core_count import core_count
from rannd.runner.launch.mpi import find_launcher
from rannd.runner.resources import host_list
from rannd.runner.resources.inherited import without_rank

WRONG = 1
"""Exit code if a check fails."""
PING_S = 120.0
"""Timeout for the two ranks, in seconds: importing torch takes a second or two on a quiet machine."""
_MARK = "rannd ping "
"""As in rannd/runtime/comm/ping.py, which is not imported here because it imports torch."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    good: bool
    text: str
    """What was found; if it is wrong, also what to do."""

    def line(self) -> str:
        """Return the line to print."""
        return f"{'ok' if self.good else 'WRONG':<6} {self.name:<14} {self.text}"


def check(file: Path | None, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Run the checks one after the other. `file`: the configuration to read instead of rannc_conf.toml."""
    yield Finding("Python", True, f"{platform.python_version()} at {sys.executable}")
    yield _looked("packages", _packages)
    config: list[Config] = []
    yield _looked("configuration", lambda: _configuration(file, config))
    yield Finding("devices", True, _devices(environ))
    launcher = _looked("MPI", lambda: _launcher(environ))
    yield launcher
    if config:
        yield _looked("daemon", lambda: _daemon(config[0]))
    if config and launcher.good:
        yield _looked("two ranks", lambda: _ping(file, environ))


def _looked(name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(name, True, look())
    except (RanndError, OSError) as exc:
        return Finding(name, False, str(exc))


def _packages() -> str:
    found = [f"rannd {__version__}"]
    for name in ("torch", "pyzmq", "spdlog"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            raise LaunchError(
                f"{name} is not installed beside {sys.executable}; 'pip install rannd' installs all dependencies"
            ) from None
    return ", ".join(found)


def _configuration(file: Path | None, loaded: list[Config]) -> str:
    config = rannd.config.load(file=file)
    loaded.append(config)
    set_here = [line for line in config.lines() if not line.endswith("# default")]
    return f"{len(set_here)} items differ from their defaults (rannc-run --show-config)"


def _devices(environ: Mapping[str, str]) -> str:
    gpus, cores = host_list.gpu_count(environ), core_count()
    ranks = host_list.default_size(gpus, cores)
    started = "one rank" if ranks == 1 else f"{ranks} ranks"
    return f"GPUs: {gpus}, cores: {cores}; rannc-run starts {started} unless -np is given"


def _launcher(environ: Mapping[str, str]) -> str:
    found = find_launcher(environ)
    return f"{found.kind.value} ({found.version}) at {found.path}"


def _daemon(config: Config) -> str:
    if config.cache == "off":
        return "not asked: cache=off"
    from rannd.daemon.cli_common import configured_session, size_text

    session = configured_session(config)
    session.greet()
    state = session.state()
    return (
        f"pid {state.pid}, rannd {state.version}, {state.entries} entries of {size_text(state.bytes)} in {state.store}"
    )


def _ping(file: Path | None, environ: Mapping[str, str]) -> str:
    """Start two ranks that connect and send messages to each other."""
    # Two ranks on this machine, whatever job this runs in, and whatever the configuration says about other jobs.
    ranks = {**without_rank(environ), "RANNC_LOG_LEVEL": "warn", "RANNC_HOSTS": "localhost:2", "RANNC_HOSTFILE": ""}
    ranks |= {"RANNC_LOG_DIR": "", "RANNC_SHOW_RANKS": ""}
    if host_list.gpu_count(environ) == 1:
        ranks["RANNC_DEVICE"] = "cpu"  # a GPU takes one rank
    command = [sys.executable, "-c", "from rannd.runner.run import main; main()", "-np", "2", "--no-tune"]
    if file is not None:
        command += ["--config", str(file)]
    command += ["-m", "rannd.runtime.comm.ping"]
    try:
        done = subprocess.run(
            command,
            env=ranks,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PING_S,
            check=False,
        )
    except subprocess.TimeoutExpired as exc:
        said = (exc.stdout or b"").decode(errors="replace") if isinstance(exc.stdout, bytes) else (exc.stdout or "")
        raise LaunchError(f"they did not end within {PING_S:g} s; output:\n{_indented(said)}") from None
    line = next((each for each in done.stdout.splitlines() if _MARK in each), None)
    if done.returncode != 0 or line is None:
        raise LaunchError(f"they ended with code {done.returncode}; output:\n{_indented(done.stdout)}")
    found = json.loads(line[line.index(_MARK) + len(_MARK) :])
    return (
        f"on {found['device']}, torch {found['torch']}: a message takes {found['latency_us']:.0f} us, "
        f"and large ones {found['bytes_per_us'] / 1000:.2f} GB/s"
    )


def _indented(text: str) -> str:
    return "\n".join(f"       {line}" for line in text.strip().splitlines()[-20:]) or "       (nothing)"


def tell(findings: Iterator[Finding], say: Callable[[str], None]) -> int:
    """Print each result as soon as it is available; return the exit code."""
    code = 0
    for finding in findings:
        say(finding.line())
        code = code if finding.good else WRONG
    return code
