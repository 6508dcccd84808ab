"""What a job is asked to be: a flag goes before a variable, a variable before the file, the file before the default."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from thinned import one_in
from transcript import Shell, program

from rannd.config import ITEMS, load
from rannd.errors import UsageError
from rannd.runner.run_options import FLAGS, Options, with_flags

#: Of each item a flag with its value, and another value as a variable and in the file.
VALUES = {
    "nproc": (["-np", "2"], "2", "3", "4"),
    "hosts": (["--hosts", "a:2,b:2"], '"a:2,b:2"', "c:2", '"d:2"'),
    "hostfile": (["--hostfile", "mine"], '"mine"', "theirs", '"ours"'),
    "log_dir": (["--log-dir", "logs"], '"logs"', "elsewhere", '"kept"'),
    "show_ranks": (["--show-ranks", "0"], '"0"', "1", '"0-1"'),
    "grace_period": (["--grace-period", "3"], "3.0", "2.5", "7"),
    "timeout_start": (["--timeout-start", "60"], "60.0", "0", "30"),
    "tune": (["--no-tune"], "false", "true", "true"),
    "preflight": (["--no-preflight"], "false", "true", "true"),
    "elastic": (["--elastic"], "true", "false", "false"),
    "min_np": (["--min-np", "2"], "2", "3", "4"),
    "max_np": (["--max-np", "8"], "8", "9", "10"),
    "max_restarts": (["--max-restarts", "3"], "3", "0", "5"),
    "leave_timeout": (["--leave-timeout", "60"], "60.0", "2.5", "7"),
    "drop_stragglers": (["--drop-stragglers"], "true", "false", "false"),
    "verify_step": (["--verify", "7"], "7", "5", "2"),
}
OF_RANKS = {"checkpoint_every", "snapshots", "checkpoints_kept", "straggler_factor"}
"""Items of these groups that are read by ranks."""


def test_every_flag_that_is_an_item_is_looked_at_here() -> None:
    items = {name for name, row in ITEMS.items() if row.group in ("Launch", "Elastic jobs")}
    assert set(VALUES) == set(FLAGS) == items - OF_RANKS | {"verify_step"}


@pytest.mark.parametrize("name", one_in(3, VALUES))
def test_flag_variable_file_default(shell: Shell, name: str) -> None:
    flag, flagged, variable, written = VALUES[name]
    row = ITEMS[name]
    own = shell.home / "own.toml"
    own.write_text(f"# mine\n{name} = {written}\n")
    from_file = {"RANNC_CONF_FILE": str(own)}

    def line(*flags: str, **environ: str) -> str:
        code, out, err = shell.run(*flags, "--show-config", **environ)
        assert (code, err) == (0, "")
        (found,) = re.findall(rf"^{name} = .*$", out, re.M)
        return str(found)

    assert line().endswith("  # default")
    parsed = written if row.type is not float else f"{float(written)}"
    assert line(**from_file) == f"{name} = {parsed}  # {own}:2"
    assert line(**from_file, **{row.variable: variable}).endswith(f"  # {row.variable}")
    told = flag[0] if flag[0] != "-np" else "--nproc"
    assert line(*flag, **from_file, **{row.variable: variable}) == f"{name} = {flagged}  # {told}"


def test_quiet_is_one_level_of_the_log(shell: Shell) -> None:
    """For the ranks, and for what rannc-run itself says beside warnings."""
    code, out, _ = shell.run("--quiet", "--show-config", RANNC_LOG_LEVEL="debug")
    assert code == 0
    assert 'log_level = "warn"  # --quiet\n' in out
    script = program("environ.py")
    shown = shell.run("-np", "1", "-q", script, "RANNC_LOG_LEVEL", RANNC_LOG_LEVEL="debug")
    assert (shown[0], shown[2]) == (0, "")
    assert json.loads(shown[1]) == {"RANNC_LOG_LEVEL": "warn"}


def test_a_flag_says_yes_again_where_the_file_says_no(shell: Shell) -> None:
    (shell.home / "own.toml").write_text("tune = false\npreflight = false\n")
    code, out, _ = shell.run("--config", "own.toml", "--tune", "--preflight", "--show-config")
    assert code == 0
    assert "tune = true  # --tune\n" in out
    assert "preflight = true  # --preflight\n" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('nproc = "two"', 'own.toml:1: nproc = "two", but nproc must be a whole number, 0 or more'),
        ("grace_period = -1", "own.toml:1: grace_period = -1.0, but grace_period must be a number, 0 or more"),
        ("tune = 0", "own.toml:1: tune = 0, but tune must be true or false"),
        ("hosts = 4", "own.toml:1: hosts = 4, but hosts must be a string"),
        ('hosts = "a:x"', "own.toml:1: --hosts a:x: 'a:x' is not a host"),
        ('hostfile = "none"', "own.toml:1: --hostfile none cannot be read"),
        ('show_ranks = "9"', "own.toml:1: show_ranks = 9: the job has ranks 0 to 1"),
        ('hosts = "a"\nhostfile = "b"', "both hosts = a (own.toml:1) and hostfile = b (own.toml:2) are given"),
    ],
)
def test_wrong_items_name_their_place(shell: Shell, text: str, message: str) -> None:
    (shell.home / "own.toml").write_text(text)
    options = ["--config", "own.toml"] if "nproc" in text or "host" in text else ["--config", "own.toml", "-np", "2"]
    code, out, err = shell.run(*options, "--dry-run", program("speak.py"))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def asked(environ: dict[str, str], **flags: object) -> Options:
    return Options.of(with_flags(load(environ), flags))


@pytest.fixture
def conf(tmp_path: Path) -> dict[str, str]:
    return {"RANNC_CONF_DIR": str(tmp_path)}


def test_the_higher_of_hosts_and_hostfile_holds(conf: dict[str, str]) -> None:
    Path(conf["RANNC_CONF_DIR"], "rannc_conf.toml").write_text('hostfile = "hf"\n')
    assert asked(conf).hostfile == Path("hf")
    options = asked(conf, hosts="a:2")
    assert (options.hosts, options.hostfile) == ("a:2", None)
    assert options.by_flag("hosts")
    options = asked(conf | {"RANNC_HOSTS": "a"})
    assert (options.hosts, options.hostfile, options.origin("hosts")) == ("a", None, "RANNC_HOSTS")
    options = asked(conf | {"RANNC_HOSTS": "a"}, hostfile="other")
    assert (options.hosts, options.hostfile) == (None, Path("other"))


def test_both_in_one_place_are_an_error(conf: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="both --hosts a and --hostfile b are given; leave one out"):
        asked(conf, hosts="a", hostfile="b")
    with pytest.raises(UsageError, match="both RANNC_HOSTS a and RANNC_HOSTFILE b are given"):
        asked(conf | {"RANNC_HOSTS": "a", "RANNC_HOSTFILE": "b"})


def test_what_is_empty_is_not_asked_for(conf: dict[str, str]) -> None:
    Path(conf["RANNC_CONF_DIR"], "rannc_conf.toml").write_text('hosts = ""\nhostfile = ""\nlog_dir = "kept"\n')
    options = asked(conf | {"RANNC_LOG_DIR": ""})
    assert (options.size, options.hosts, options.hostfile, options.log_dir, options.shown) == (None,) * 5
    assert (options.grace, options.start, options.tune, options.preflight) == (10.0, 300.0, True, True)


def test_paths_are_from_the_working_directory_and_home(conf: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    options = asked(conf | {"RANNC_LOG_DIR": "~/logs", "RANNC_HOSTFILE": "hosts"})
    assert (options.log_dir, options.hostfile) == (Path("/home/u/logs"), Path("hosts"))


# --- a file that other programs would read ---------------------------------------------------------

UNREAD = "rannc-run: ./rannc_conf.toml is not read; use --config rannc_conf.toml to read it\n"


@pytest.mark.ranks
def test_a_file_in_the_working_directory_is_not_read_in_silence(shell: Shell) -> None:
    (shell.home / "rannc_conf.toml").write_text("nproc = 2\n")
    options = ("-np", "1", "--no-tune")
    assert shell.run(*options, program("no_newline.py")) == (0, "first\nlast", f"{UNREAD}error without end")
    code, out, err = shell.run("--show-config")
    assert (code, err) == (0, UNREAD)
    assert "nproc = 0  # default" in out
    assert shell.run("--config", "rannc_conf.toml", "--show-config")[2] == ""


def test_the_check_says_so_too(shell: Shell) -> None:
    (shell.home / "rannc_conf.toml").write_text("nproc = 2\n")
    (shell.home / "other.toml").write_text("nproc = 'two'\n")  # so that the check starts nothing
    assert shell.run("--check", "--config", "other.toml")[2] == UNREAD


def test_a_wrong_place_of_the_configuration_is_told_as_ever(shell: Shell) -> None:
    (shell.home / "rannc_conf.toml").touch()
    code, out, err = shell.run("--check", RANNC_CONF_DIR="/nowhere")
    assert (code, err) == (1, "")
    assert re.search(r"^WRONG +configuration +RANNC_CONF_DIR=/nowhere does not exist", out, re.M)


def test_the_file_that_is_read_is_not_spoken_of(shell: Shell) -> None:
    shell.home = Path(shell.environ["RANNC_CONF_DIR"])
    (shell.home / "rannc_conf.toml").write_text("nproc = 2\n")
    code, out, err = shell.run("--show-config")
    assert (code, err) == (0, "")
    assert f"nproc = 2  # {shell.home}/rannc_conf.toml:1\n" in out
