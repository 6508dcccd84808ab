"""Options of a job: the flags of rannc-run, and configuration items for flags that are not given."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rannd.config import ITEMS, Config
from rannd.errors import UsageError

#: Configuration items that are also flags, and their flags.
FLAGS = {
    "nproc": "--nproc",
    "hosts": "--hosts",
    "hostfile": "--hostfile",
    "log_dir": "--log-dir",
    "show_ranks": "--show-ranks",
    "grace_period": "--grace-period",
    "timeout_start": "--timeout-start",
    "tune": "--tune",
    "preflight": "--preflight",
    "elastic": "--elastic",
    "min_np": "--min-np",
    "max_np": "--max-np",
    "max_restarts": "--max-restarts",
    "leave_timeout": "--leave-timeout",
    "drop_stragglers": "--drop-stragglers",
    "verify_step": "--verify",
}
ELASTIC = ("elastic", "min_np", "max_np", "max_restarts", "leave_timeout", "drop_stragglers")
"""Those of elastic jobs."""
QUIET = "--quiet"
"""Flag that is short for one value of the item log_level."""


def with_flags(config: Config, flags: Mapping[str, object]) -> Config:
    """Return `config` with the items that flags override.

    Args:
        config: From the file and the variables.
        flags: Values by item of `FLAGS`; None: not given.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    return config.override(given, {name: _flag(name, value) for name, value in given.items()})


def quietly(config: Config) -> Config:
    """Return `config` with the item that --quiet stands for."""
    return config.override({"log_level": "warn"}, {"log_level": QUIET})


def _flag(name: str, value: object) -> str:
    return FLAGS[name].replace("--", "--no-", 1) if value is False else FLAGS[name]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a job from any source: command line, variables, or file."""

    command: tuple[str, ...]
    """The script or module and its arguments."""
    size: int | None = None
    module: bool = False
    hosts: str | None = None
    hostfile: Path | None = None
    """Never set together with `hosts`."""
    config: Path | None = None
    tune: bool = True
    shown: str | None = None
    log_dir: Path | None = None
    grace: float = 10.0
    start: float = 300.0
    """Seconds within which all ranks must start; 0: no limit."""
    preflight: bool = True
    """Check before anything starts that other machines have what a rank needs."""
    plan_only: bool = False
    verify: int = 0
    """Training step that the ranks replay; 0: what their own configuration says."""
    quiet: bool = False
    """Neither ranks nor rannc-run say more than warnings and errors."""
    cluster: str | None = None
    """Name or file of the devices to plan for."""
    fewer_ranks: bool = False
    """Whether there may be fewer ranks than `shown` names: those of an elastic job come and go."""
    origins: Mapping[str, str] | None = None
    """Source of the items of `FLAGS`, as of `Config.origin`; None: all are flags."""

    @staticmethod
    def of(
        config: Config,
        command: tuple[str, ...] = (),
        *,
        module: bool = False,
        file: Path | None = None,
        plan_only: bool = False,
        cluster: str | None = None,
    ) -> Options:
        """Return the options of a configuration that includes the flags.

        Raises:
            UsageError: Both hosts and hostfile are given, in the same source; flags of elastic jobs without --elastic.
        """
        wanted = _hosts_or_hostfile(config)
        idle = [FLAGS[name] for name in ELASTIC if config.origin(name) == FLAGS[name] and not config.elastic]
        if idle:
            raise UsageError(f"{', '.join(idle)} without --elastic; add it, or leave them out")
        return Options(
            command=command,
            size=config.nproc or None,
            module=module,
            hosts=config.hosts if wanted == "hosts" else None,
            hostfile=Path(config.hostfile).expanduser() if wanted == "hostfile" else None,
            config=file,
            tune=config.tune,
            shown=config.show_ranks or None,
            log_dir=Path(config.log_dir).expanduser() if config.log_dir else None,
            grace=config.grace_period,
            start=config.timeout_start,
            preflight=config.preflight,
            plan_only=plan_only,
            verify=config.verify_step if config.origin("verify_step").startswith("--") else 0,
            quiet=config.origin("log_level") == QUIET,
            cluster=cluster,
            origins={name: config.origin(name) for name in FLAGS},
        )

    def origin(self, name: str) -> str:
        """Return the source of an item of `FLAGS`."""
        return self.origins[name] if self.origins is not None else FLAGS[name]

    def variables(self) -> dict[str, str]:
        """Return the variables that pass on to ranks what the command line says of their configuration."""
        found = {} if self.config is None else {"RANNC_CONF_FILE": str(self.config.absolute())}
        if self.verify:
            found["RANNC_VERIFY_STEP"] = str(self.verify)
        return found | ({"RANNC_LOG_LEVEL": "warn"} if self.quiet else {})

    def by_flag(self, name: str) -> bool:
        """Whether an item of `FLAGS` is from the command line."""
        return self.origin(name).startswith("--")


def _hosts_or_hostfile(config: Config) -> str | None:
    """Return the one of the two items that applies: the one from the source with the higher priority."""
    named = [name for name in ("hosts", "hostfile") if getattr(config, name)]
    if len(named) < 2:
        return named[0] if named else None
    hosts, hostfile = (_height(name, config.origin(name)) for name in named)
    if hosts == hostfile:
        raise UsageError(f"both {_told(config, 'hosts')} and {_told(config, 'hostfile')} are given; leave one out")
    return "hosts" if hosts > hostfile else "hostfile"


def _height(name: str, origin: str) -> int:
    """Return the priority of a source: the command line overrides a variable, which overrides the file."""
    return 2 if origin == FLAGS[name] else 1 if origin == ITEMS[name].variable else 0


def _told(config: Config, name: str) -> str:
    origin, value = config.origin(name), getattr(config, name)
    return f"{name} = {value} ({origin})" if _height(name, origin) == 0 else f"{origin} {value}"


def rank_command(options: Options) -> list[str]:
    """Return the command that a rank executes.

    Raises:
        UsageError: No script is named, or it cannot be read.
    """
    if not options.command:
        what = "module" if options.module else "script"
        raise UsageError(
            f"no {what} was given; write rannc-run -np 2 {'-m pkg.train' if options.module else 'train.py'}"
        )
    if options.module:
        return [sys.executable, "-m", *options.command]
    script = Path(options.command[0])
    if script.is_dir() and not (script / "__main__.py").is_file():
        raise UsageError(f"{script} is a directory without __main__.py; name a Python script")
    if not script.exists():
        hint = "rannc-run takes the script itself" if script.name.startswith("python") else "is the path right?"
        raise UsageError(f"there is no script {script} in {Path.cwd()}; {hint}")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script} cannot be read; check its permissions")
    return [sys.executable, *options.command]
