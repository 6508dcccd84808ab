"""Shell transcripts of rannc-run: a command, what it prints, its exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import pytest
from transcript import RANNC_RUN, Shell, program, read_lines

from rannd.config.cluster import cluster_file
from rannd.runner.resources.host_list import gpu_count

pytestmark = pytest.mark.ranks

TABLE_HEAD = r"host +rank +pid +time +end +error"


def lines_of(text: str, rank: int) -> list[str]:
    """What rank `rank` printed, without its prefix."""
    return re.findall(rf"^\[[^:\]]+:{rank}\] (.*)$", text, re.MULTILINE)


# --- a script sees what it sees under plain python ------------------------------------------------


def test_everything_after_the_script_is_its_own(shell: Shell) -> None:
    script = program("speak.py")
    code, out, err = shell.run("-np", "2", "--no-tune", script, "-np", "3", "--help", "--", "-m", "", ":", "::", "a:")
    assert code == 0
    for rank in range(2):
        (line,) = lines_of(out, rank)
        assert json.loads(line) == {
            "argv": [script, "-np", "3", "--help", "--", "-m", "", ":", "::", "a:"],
            "cwd": str(shell.home),
            "name": "__main__",
            "stdin": "",
            "rank": str(rank),
        }
        assert lines_of(err, rank) == [f"error stream of {rank}"]


def test_a_module(shell: Shell) -> None:
    package = shell.home / "pkg"
    package.mkdir()
    (package / "train.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    code, out, _ = shell.run("-m", "-np", "1", "pkg.train", "--help")
    assert (code, out) == (0, "__main__ ['--help']\n")


def test_one_rank_prints_without_prefix(shell: Shell) -> None:
    assert shell.run("-np", "1", "--no-tune", program("no_newline.py")) == (0, "first\nlast", "error without end")


def test_the_watcher_leaves_no_variable(shell: Shell) -> None:
    _, out, _ = shell.run("-np", "1", program("environ.py"), "RANND_WATCHER")
    assert json.loads(out) == {"RANND_WATCHER": None}


# --- output ---------------------------------------------------------------------------------------


def test_last_lines_without_end_are_completed(shell: Shell) -> None:
    code, out, err = shell.run("-np", "2", "--no-tune", program("no_newline.py"))
    assert code == 0
    assert lines_of(out, 0) == lines_of(out, 1) == ["first", "last"]
    assert lines_of(err, 0) == lines_of(err, 1) == ["error without end"]


def test_no_line_is_lost_or_torn(shell: Shell) -> None:
    code, out, _ = shell.run("-np", "3", program("many_lines.py"))
    assert code == 0
    for rank in range(3):
        assert lines_of(out, rank) == [f"{rank} {number} " + str(rank) * 9000 for number in range(200)]
    assert out.count("\n") == 600


def test_a_closed_output_ends_the_job(shell: Shell) -> None:
    process = shell.start("-np", "2", "--no-tune", program("many_lines.py"))
    read_lines(process.stdout, 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 128 + 13
    assert process.stderr is not None
    assert "SIGPIPE" in process.stderr.read()


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_streams_that_are_closed_or_full(shell: Shell, closed: str) -> None:
    """$ rannc-run -np 2 exit_on_rank.py 1 3 2>&-"""
    command = f'exec "$0" -np 2 {shlex.quote(program("exit_on_rank.py"))} 1 3 {closed}'
    shell.command = ("sh", "-c", command, *shell.command)
    code, out, err = shell.run()
    assert (code, out) == (3, "")
    assert ("the last words" in err) == (closed == ">&-")


def test_a_working_directory_that_is_gone(shell: Shell) -> None:
    shell.command = ("sh", "-c", 'mkdir gone && cd gone && rmdir ../gone && exec "$0" "$@"', *shell.command)
    code, out, err = shell.run("-np", "2", "nowhere.py")
    assert (code, out) == (2, "")
    assert err.startswith("rannc-run: the working directory cannot be used: ")


def test_only_some_ranks_are_shown(shell: Shell) -> None:
    code, out, err = shell.run("-np", "3", "--show-ranks", "0,2", "--no-tune", program("no_newline.py"))
    assert code == 0
    assert [len(lines_of(out, rank)) for rank in range(3)] == [2, 0, 2]
    assert [len(lines_of(err, rank)) for rank in range(3)] == [1, 0, 1]


def test_logs_per_rank(shell: Shell) -> None:
    logs = shell.home / "logs"
    code, _, err = shell.run("-np", "2", "--no-tune", "--log-dir", "logs", program("exit_on_rank.py"), "1", "3")
    assert code == 3
    (run,) = logs.iterdir()
    assert err.splitlines()[0] == f"rannc-run: logs: {run}"
    assert err.splitlines()[-1] == f"rannc-run: logs: {run}"
    assert (run / "rank_1" / "stderr").read_text() == "the last words\n"
    assert (run / "rank_0" / "stdout").read_text() == ""
    failure = json.loads((run / "rank_1" / "error.json").read_text())
    assert (failure["rank"], failure["status"], failure["stderr_tail"]) == (1, 3, "the last words\n")
    assert failure["ended_by_signal_of_rannc_run"] == 0
    assert json.loads((run / "rank_0" / "error.json").read_text())["ended_by_signal_of_rannc_run"] == 15


def test_logs_that_are_gone_do_not_hide_how_a_rank_ended(shell: Shell) -> None:
    script = shell.home / "tidy.py"
    script.write_text("import shutil, sys\nshutil.rmtree('logs', ignore_errors=True)\nsys.exit(3)\n")
    code, _, err = shell.run("-np", "1", "--no-tune", "--log-dir", "logs", str(script))
    assert code == 3, err
    assert "exit code 3" in err
    assert "rannc-run: this rank's error.json in " in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-np", "2", "--show-ranks", "0-99999999999"), "the job has ranks 0 to 1"),
        (("-np", "2", "--show-ranks", "²"), "'²' is not a rank"),
        (("-np", "99999999999"), "-np 99999999999 asks for more ranks than a job can have"),
    ],
)
def test_numbers_beyond_all_machines(shell: Shell, options: tuple[str, ...], message: str) -> None:
    code, out, err = shell.run(*options, program("no_newline.py"))
    assert (code, out) == (2, "")
    assert message in err


def test_without_a_grace_period_the_first_failure_is_the_only_one(shell: Shell) -> None:
    """SIGKILL follows SIGTERM at once; a rank that SIGTERM has ended was told to end as well."""
    options = ("-np", "3", "--no-tune", "--grace-period", "0")
    code, _, err = shell.run(*options, program("exit_on_rank.py"), "1", "7")
    assert code == 7
    assert "rannc-run: 1 of 3 ranks failed:" in err
    assert "rannc-run: ended by rannc-run: ranks 0, 2" in err


# --- failures -------------------------------------------------------------------------------------


def test_a_crash_at_start(shell: Shell) -> None:
    code, out, err = shell.run("-np", "2", program("crash_at_start.py"))
    assert (code, out) == (1, "")
    assert "RuntimeError: this program crashes at its start" in lines_of(err, 0) + lines_of(err, 1)
    assert re.search(r"of 2 ranks failed", err)
    assert re.search(TABLE_HEAD, err)
    assert re.search(
        r"exit code 1 +RuntimeError: this program crashes at its start \(crash_at_start.py:\d\)$", err, re.MULTILINE
    )


def test_the_exit_code_is_the_first_failing_ranks(shell: Shell) -> None:
    code, _, err = shell.run("-np", "3", "--no-tune", program("exit_on_rank.py"), "1", "7")
    assert code == 7
    assert "rannc-run: 1 of 3 ranks failed:" in err
    assert re.search(r"^rannc-run:   \S+ +1 +\d+ +[\d:.]+ +exit code 7 +the last words$", err, re.MULTILINE)
    assert "rannc-run: ended by rannc-run: ranks 0, 2" in err


def test_a_killed_rank(shell: Shell) -> None:
    code, _, err = shell.run("-np", "2", "--no-tune", program("kill_itself.py"))
    assert code == 128 + 9
    assert re.search(r" 1 +\d+ +[\d:.]+ +killed by SIGKILL \(out of memory is likely", err)


def test_the_end_of_a_hidden_ranks_errors_is_told(shell: Shell) -> None:
    code, _, err = shell.run("-np", "2", "--show-ranks", "0", program("exit_on_rank.py"), "1", "4")
    assert code == 4
    assert "rannc-run: standard error of rank 1 on " in err
    assert "rannc-run:   the last words\n" in err


@pytest.mark.parametrize("how", ["abort", "exit"])
def test_a_rank_that_leaves_mpi(shell: Shell, how: str) -> None:
    code, _, err = shell.run("-np", "2", "--no-tune", program("mpi_abort.py"), how)
    assert code == 9
    assert lines_of(err, 1)[0] == "rank 1 leaves"
    assert re.search(r" 1 +\d+ +[\d:.]+ +exit code 9 ", err)


def test_ranks_that_cannot_be_started(shell: Shell) -> None:
    code, _, err = shell.run("-np", "2", program("speak.py"), OMPI_MCA_btl="^ofi", PRTE_MCA_rmaps="nothing_like_it")
    assert code == 7
    assert "rannc-run: 2 of 2 ranks never started" in err
    assert "rannc-run: output of Open MPI:" in err
    assert "nothing_like_it" in err


def test_a_host_that_is_not_there(shell: Shell) -> None:
    code, out, err = shell.run("--no-tune", "--hosts", "nowhere.invalid:2", program("speak.py"))
    assert (code, out) == (7, "")
    assert err.startswith("rannc-run: 1 of 1 host is not ready, nothing was started (--no-preflight skips this check):")
    assert "  nowhere.invalid  name  not known here: " in err
    code, out, err = shell.run("--no-tune", "--no-preflight", "--hosts", "nowhere.invalid:2", program("speak.py"))
    assert (code, out) == (7, "")
    assert err.startswith("rannc-run: host nowhere.invalid cannot be reached: ")


# --- wrong usage: exit code 2, nothing starts -----------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-np", "2"], "no script was given"),
        (["-m"], "no module was given"),
        (["-np", "0", "x.py"], "'-np'"),
        (["-np", "2", "missing.py"], "there is no script missing.py in /"),
        (["python", "train.py"], "rannc-run takes the script itself"),
        (["."], "is a directory without __main__.py"),
        (["--hosts", "a:0", program("speak.py")], "'a:0' is not a host"),
        (["--hostfile", "nowhere", program("speak.py")], "--hostfile nowhere cannot be read"),
        (["--hosts", "localhost:2", "-np", "3", program("speak.py")], "-np 3 asks for more ranks"),
        (["--hosts", "a", "--hostfile", "b", program("speak.py")], "both --hosts a and --hostfile b"),
        (["-np", "2", "--show-ranks", "2", program("speak.py")], "the job has ranks 0 to 1"),
        (["-np", "2", "--show-ranks", "x", program("speak.py")], "'x' is not a rank"),
        (["--config", "nowhere.toml", program("speak.py")], "nowhere.toml"),
        (["--no-such-flag", program("speak.py")], "--no-such-flag"),
        (["--log-dir", "/proc/x", program("speak.py")], "--log-dir"),
    ],
)
def test_wrong_usage(shell: Shell, arguments: list[str], message: str) -> None:
    code, out, err = shell.run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_wrong_configuration_stops_before_anything_starts(shell: Shell) -> None:
    code, out, err = shell.run("-np", "2", program("speak.py"), RANNC_MEM_LIMIT_GIB="3")
    assert (code, out) == (2, "")
    assert "RANNC_MEM_LIMIT_GB" in err


# --- the environment of ranks ---------------------------------------------------------------------


def variables(shell: Shell, *options: str, **environ: str) -> dict[str, str | None]:
    names = ["OMP_NUM_THREADS", "MALLOC_MMAP_MAX_", "MASTER_ADDR", "MASTER_PORT", "PYTHONUNBUFFERED"]
    names += ["OMPI_MCA_btl", "RANNC_CONF_FILE", "RANNC_PARTITIONING_DRY_RUN_NP"]
    names += ["RANNC_PARTITIONING_DRY_RUN_CLUSTER", "RANNC_DEVICE"]
    code, out, err = shell.run("--show-ranks", "0", *options, program("environ.py"), *names, **environ)
    if "--plan-only" in options:
        assert code == 4
        assert "nothing was planned: the script ended without calling a pyrannc.RaNNCModule" in err
    else:
        assert code == 0
    result: dict[str, str | None] = json.loads(out)
    return result


def test_ranks_get_threads_and_a_meeting_point(shell: Shell) -> None:
    seen = variables(shell, "-np", "1")
    assert seen["OMP_NUM_THREADS"] is not None
    assert int(seen["OMP_NUM_THREADS"]) >= 1
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert seen["MASTER_PORT"] is not None
    assert 1024 <= int(seen["MASTER_PORT"]) < 65536
    assert seen["PYTHONUNBUFFERED"] == "1"
    assert seen["OMPI_MCA_btl"] == ("^ofi" if shell.kind == "Open MPI" else None)


def test_ranks_have_the_names_of_torchrun(shell: Shell) -> None:
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    code, out, err = shell.run("-np", "2", program("environ.py"), *names, RANK="7")
    assert code == 0, err
    seen = sorted(tuple(json.loads(text).values()) for text in re.findall("{.*}", out))
    assert seen == [("0", "0", "2", "2"), ("1", "1", "2", "2")]


def test_what_the_user_has_set_stays(shell: Shell) -> None:
    own = {"OMP_NUM_THREADS": "3", "MASTER_PORT": "1", "OMPI_MCA_btl": "self,sm", "PYTHONUNBUFFERED": "x"}
    seen = variables(shell, "-np", "2", **own)
    assert {name: seen[name] for name in own} == own


def test_no_tune(shell: Shell) -> None:
    seen = variables(shell, "-np", "2", "--no-tune")
    assert seen["OMP_NUM_THREADS"] is None
    assert seen["MALLOC_MMAP_MAX_"] is None


@pytest.mark.parametrize(("flags", "apart"), [((), True), (("--no-tune",), False)])
def test_ranks_have_cores_of_their_own(shell: Shell, flags: tuple[str, ...], apart: bool) -> None:
    own = os.sched_getaffinity(0)
    if len(own) < 2 or gpu_count({}):
        pytest.skip("needs two cores, and no GPU")
    code, out, err = shell.run("-np", "2", *flags, program("cores.py"), OMP_NUM_THREADS="1")
    assert code == 0, err
    first, second = (set(json.loads(text)) for text in re.findall(r"\[[\d, ]+\]$", out, re.MULTILINE))
    assert first | second == own
    assert first.isdisjoint(second) == apart
    assert ("cores of its own for each rank" in err) == apart


def test_tuning_is_told_in_one_line(shell: Shell) -> None:
    _, _, err = shell.run("-np", "1", program("environ.py"))
    assert re.fullmatch(r"rannc-run: tuned OMP_NUM_THREADS=\d+.*; --no-tune turns this off\n", err)


def test_the_configuration_file_reaches_the_ranks(shell: Shell) -> None:
    (shell.home / "own.toml").write_text("partition_num = 3\n")
    seen = variables(shell, "-np", "1", "--config", "own.toml")
    assert seen["RANNC_CONF_FILE"] == str(shell.home / "own.toml")
    code, out, _ = shell.run("--show-config", RANNC_CONF_FILE=str(seen["RANNC_CONF_FILE"]))
    assert code == 0
    assert f"partition_num = 3  # {shell.home / 'own.toml'}:1" in out


def test_plan_only_is_one_rank_that_plans_for_many(shell: Shell) -> None:
    seen = variables(shell, "--plan-only", "-np", "64")
    assert seen["RANNC_PARTITIONING_DRY_RUN_NP"] == "64"
    assert (seen["RANNC_PARTITIONING_DRY_RUN_CLUSTER"], seen["RANNC_DEVICE"]) == (None, None)


def test_a_cluster_is_planned_for_without_its_devices(shell: Shell) -> None:
    seen = variables(shell, "--plan-only", "--cluster", "a100x8")
    assert seen["RANNC_PARTITIONING_DRY_RUN_NP"] == "8"
    assert str(seen["RANNC_PARTITIONING_DRY_RUN_CLUSTER"]).endswith("/a100x8.toml")
    assert seen["RANNC_DEVICE"] == "cpu"
    own = shell.home / "own.toml"
    own.write_text(cluster_file("workstation").read_text())
    seen = variables(shell, "--plan-only", "-np", "3", "--cluster", "./own.toml", RANNC_DEVICE="auto")
    assert seen["RANNC_PARTITIONING_DRY_RUN_NP"] == "3"
    assert seen["RANNC_PARTITIONING_DRY_RUN_CLUSTER"] == str(own)
    assert seen["RANNC_DEVICE"] == "auto"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--cluster", "a100x8"), "--cluster a100x8 is only for planning; add --plan-only"),
        (("--plan-only", "--cluster", "a100"), "no cluster is named 'a100'; there are a100x8, cpu, "),
        (("--plan-only", "--cluster", "./none.toml"), "none.toml: there is no such file; is the path right?"),
        (("--plan-only", "--cluster", "./bad.toml"), "bad.toml:1: no key of a cluster is named devcie; the nearest is"),
        (("--plan-only", "--cluster", "workstation", "-np", "5"), "5 devices are 2 nodes of cluster workstation"),
    ],
)
def test_a_wrong_cluster_stops_the_job_before_it_starts(shell: Shell, options: tuple[str, ...], message: str) -> None:
    (shell.home / "bad.toml").write_text('devcie = "Box"\n')
    code, out, err = shell.run(*options, program("environ.py"))
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# --- what starts nothing --------------------------------------------------------------------------


def test_show_config_tells_where_a_value_is_from(shell: Shell) -> None:
    code, out, err = shell.run("--show-config", RANNC_PARTITION_NUM="2")
    assert (code, err) == (0, "")
    assert "partition_num = 2  # RANNC_PARTITION_NUM\n" in out
    assert "max_pipeline = 32  # default\n" in out


def test_dry_run(shell: Shell) -> None:
    code, out, err = shell.run("--dry-run", "-np", "2", "--hosts", "one:1,two:1", program("speak.py"), "a b")
    assert (code, err) == (0, "")
    script = f"{program('speak.py')} 'a b'"
    start = r"^rank 0: host one, local rank 0, (cpu|cuda:0): \S+/python\S* "
    assert re.search(start + re.escape(script) + "$", out, re.M)
    assert re.search(r"^rank 1: host two, local rank 0", out, re.M)
    assert re.search(r"^  MASTER_ADDR=one$", out, re.M)
    assert "--host one:1,two:1" in out
    assert "-x RANND_WATCHER" in out


def test_version(shell: Shell) -> None:
    code, out, _ = shell.run("--version")
    assert code == 0
    assert re.fullmatch(r"rannc-run, version \d+\.\d+.*\n", out)


# --- the daemon -----------------------------------------------------------------------------------


def test_the_daemon_runs_before_the_ranks(shell: Shell, daemon_home: object) -> None:
    names = ["XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "RANNC_CONF_DIR"]
    variables = {name: os.environ[name] for name in names}
    code, _, _ = shell.run("-np", "1", program("speak.py"), **variables, RANNC_CACHE="on")
    assert code == 0
    assert len(daemon_home.pids()) == 1  # type: ignore[attr-defined]


def test_a_job_runs_without_a_daemon(shell: Shell, tmp_path: Path) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir()
    (runtime / "rannd").write_text("a file where the daemon wants its directory")
    code, out, err = shell.run("-np", "1", program("no_newline.py"), XDG_RUNTIME_DIR=str(runtime), RANNC_CACHE="on")
    assert (code, out) == (0, "first\nlast")
    assert err.count("rannc-run: no daemon, nothing will be cached: ") == 1


@pytest.mark.parametrize(
    ("command", "begun", "wanted"),
    [
        ("rannc-run", "--gr", "--grace-period"),
        ("rannc-cache", "pr", "prune"),
        ("rannd", "sta", "status"),
    ],
)
def test_shells_complete_options_and_commands(shell: Shell, command: str, begun: str, wanted: str) -> None:
    variable = f"_{command.upper().replace('-', '_')}_COMPLETE"
    shell.command = (str(RANNC_RUN.parent / command),)
    code, out, err = shell.run(**{variable: "bash_complete", "COMP_WORDS": f"{command} {begun}", "COMP_CWORD": "1"})
    assert (code, err) == (0, "")
    assert f"plain,{wanted}" in out.splitlines()
    code, out, err = shell.run(**{variable: "bash_source"})
    assert (code, err) == (0, "")
    assert f"complete -o nosort -F _{command.replace('-', '_')}_completion {command}" in out
