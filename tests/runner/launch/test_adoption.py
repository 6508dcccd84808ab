"""rannc-run inside a rank that somebody else has started: it becomes that rank; alone in a world, it starts its own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest
from other_launchers import NAMES, other_shell
from test_launchers import TRAIN
from transcript import RANNC_RUN, Shell, program

from rannd.errors import UsageError
from rannd.runner.resources.inherited import Rank, rank_here, without_rank

FORK = fork_server.__file__
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
OMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}


# --- who this process is --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "rank"),
    [
        ({}, None),
        (OMPI, Rank(0, 4, 0, 2, "Open MPI's mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "HYDI_CONTROL_FD": "7"}, Rank(1, 2, 1, None, "MPICH's mpiexec")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "I_MPI_HYDRA_UUID": "x"}, Rank(1, 2, 1, None, "Intel MPI's mpirun")),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, Rank(1, 2, 1, None, "mpiexec")),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},
            Rank(3, 4, 1, 2, "torchrun"),
        ),
        ({"RANK": "0", "WORLD_SIZE": "2"}, Rank(0, 2, 0, None, "whoever set RANK and WORLD_SIZE")),
        ({"RANK": "0"}, None),
        (
            {"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_NODEID": "1"},
            Rank(2, 3, 0, 1, "Slurm's srun", by_srun=True),
        ),
        # srun --mpi=pmi2 sets both
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            Rank(1, 2, 1, None, "Slurm's srun", by_srun=True),
        ),
        # MPICH's daemons may be srun's, its ranks are not
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "HYDI_CONTROL_FD": "7",
            },
            Rank(1, 2, 1, None, "MPICH's mpiexec"),
        ),
        # the script of sbatch
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, None),
    ],
)
def test_who_started_this_process(environ: dict[str, str], rank: Rank | None) -> None:
    assert rank_here(environ) == rank


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2: the rank must be a number below the size; unset"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x, WORLD_SIZE=2: the rank must be a number below the size"),
        ({"RANK": "²", "WORLD_SIZE": "3"}, "RANK=², WORLD_SIZE=3: the rank must be a number below the size"),
        ({"PMIX_RANK": "0"}, r"PMIx launcher \(PMIX_RANK=0\) that does not say how many.*from outside that launcher"),
    ],
)
def test_variables_that_make_no_sense(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        rank_here(environ)


def test_what_is_forgotten_and_what_stays() -> None:
    stay = {"PATH": "/bin", "OMPI_MCA_btl": "tcp", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PMIX_MCA_gds": "hash", "RANKS": "1"}
    stay |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_TASKS_PER_NODE": "1", "SLURM_NTASKS": "1"}
    stay |= {"MASTER_ADDR": "x", "MASTER_PORT": "1", "SLURM_NTASKS_PER_NODE": "1", "I_MPI_PERHOST": "2"}
    go = {**OMPI, "PMIX_NAMESPACE": "x", "PMI_FD": "9", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    go |= {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "OMPI_MCA_orte_hnp_uri": "x"}
    go |= {"HYDI_CONTROL_FD": "7", "HYDRA_BSTRAP_PROXY_ID": "0", "OMPI_MCA_orte_default_hostfile": "x"}
    assert without_rank(stay | go) == stay
    left = without_rank(stay | {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert "MASTER_PORT" not in left, "torchrun itself listens there"


# --- a rank that is adopted -----------------------------------------------------------------------


def by_mpirun(shell: Shell, count: int) -> Shell:
    """The shell in each of so many ranks of Open MPI."""
    shell.environ |= ROOT_MAY
    shell.command = (str(RANNC_RUN.parent / "mpirun"), "-np", str(count), "--oversubscribe", *shell.command)
    return shell


@pytest.mark.ranks
def test_rannc_run_becomes_the_rank_that_mpirun_started(shell: Shell) -> None:
    (shell.home / "train.py").write_text(TRAIN)
    (shell.home / "own.toml").write_text("partition_num = 2\n")
    code, out, err = by_mpirun(shell, 2).run("--config", "own.toml", "train.py")
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
    told = "rannc-run: already rank 0 of 2, started by Open MPI's mpirun: running train.py as it\n"
    assert err.count(told) == 1
    assert "already rank 1" not in err
    assert "started with -np" not in err


@pytest.mark.ranks
def test_an_adopted_rank_gets_its_arguments_and_configuration(shell: Shell) -> None:
    (shell.home / "own.toml").write_text('log_level = "warn"\n')
    names = ["RANNC_CONF_FILE", "PYTHONUNBUFFERED", "OMPI_COMM_WORLD_SIZE", "RANND_WATCHER"]
    code, out, _ = by_mpirun(shell, 2).run("--config", "own.toml", "--no-tune", program("environ.py"), *names)
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            "RANNC_CONF_FILE": str(shell.home / "own.toml"),
            "PYTHONUNBUFFERED": None,
            "OMPI_COMM_WORLD_SIZE": "2",
            "RANND_WATCHER": None,
        }
    ] * 2


@pytest.mark.ranks
def test_a_rank_of_torchrun(shell: Shell, forks: Path) -> None:
    (shell.home / "train.py").write_text(TRAIN)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python")
    shell.command = (*torchrun, *shell.command)
    code, out, err = shell.run(FORK, "train.py", **{fork_server.VARIABLE: str(forks)})
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
    assert f"rannc-run: already rank 0 of 2, started by torchrun: running {FORK} as it\n" in err


@pytest.mark.ranks
def test_the_exit_code_of_an_adopted_rank_is_the_scripts(shell: Shell) -> None:
    code, _, err = by_mpirun(shell, 2).run("--no-tune", program("exit_on_rank.py"), "1", "7")
    assert code == 7
    assert "the last words" in err


@pytest.mark.ranks
def test_the_daemon_runs_before_an_adopted_rank(shell: Shell, daemon_home) -> None:  # type: ignore[no-untyped-def]
    code, _, err = by_mpirun(shell, 2).run(program("which.py"), RANNC_CACHE="on", **daemon_home.variables())
    assert code == 0, err
    assert len(daemon_home.pids()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", "2"], "-np 2, but this process is rank 0 of 4 already, started by Open MPI's mpirun; leave out -np"),
        (["--hosts", "a:4"], "--hosts a:4, but this process is rank 0 of 4 already"),
        (["--hostfile", "hf"], "--hostfile hf, but this process is rank 0 of 4 already"),
        (["--plan-only"], "and --plan-only plans in one process: call it once, outside that job"),
    ],
)
def test_what_asks_for_another_job_is_an_error(shell: Shell, options: list[str], message: str) -> None:
    code, out, err = shell.run(*options, program("speak.py"), **OMPI)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_threads_are_shared_out_where_it_is_known_among_how_many(shell: Shell) -> None:
    def threads(**environ: str) -> str | None:
        code, out, err = shell.run(program("environ.py"), "OMP_NUM_THREADS", **environ)
        assert code == 0, err
        found: dict[str, str | None] = json.loads(out)
        return found["OMP_NUM_THREADS"]

    assert threads(**OMPI) is not None
    assert threads(RANK="0", WORLD_SIZE="64") is None
    assert threads(**OMPI, OMP_NUM_THREADS="5") == "5"


def test_a_missing_script_is_told_in_an_adopted_rank_too(shell: Shell) -> None:
    code, _, err = shell.run("missing.py", **OMPI)
    assert (code, "there is no script missing.py" in err) == (2, True)


def test_the_configuration_is_no_contradiction_and_the_dry_run_starts_nothing(shell: Shell) -> None:
    asked = {"RANNC_NPROC": "2", "RANNC_HOSTS": "a:2"}
    code, out, err = shell.run("-np", "4", "--dry-run", program("speak.py"), **OMPI, **asked)
    assert (code, err) == (0, "")
    assert re.match(rf"rank 0 of 4, started by Open MPI's mpirun: \S+ {re.escape(program('speak.py'))}\n", out)
    assert "variables added to the environment:\n" in out


def test_flags_for_own_ranks_say_that_they_do_nothing(shell: Shell) -> None:
    options = ("--no-tune", "--log-dir", "logs", "--show-ranks", "0")
    code, _, err = shell.run(*options, program("which.py"), **OMPI)
    assert code == 0
    assert "rannc-run: --log-dir, --show-ranks have no effect here: they only affect ranks that rannc-run starts" in err
    assert not (shell.home / "logs").exists()
    _, _, err = shell.run("--no-tune", program("which.py"), **OMPI, RANNC_LOG_DIR="logs")
    assert "no effect" not in err


# --- a world of one -------------------------------------------------------------------------------


@pytest.mark.ranks
def test_ranks_of_its_own_in_a_rank_that_is_alone(shell: Shell) -> None:
    code, out, err = by_mpirun(shell, 1).run("-np", "2", "--no-tune", program("speak.py"))
    assert code == 0, err
    assert len(re.findall(r'"rank": "[01]"', out)) == 2
    assert "already rank" not in err


@pytest.fixture(params=NAMES)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shell]:
    yield from other_shell(request.param, tmp_path)


@pytest.mark.ranks
def test_other_launchers(other: Shell) -> None:
    """A world of one under MPICH and Intel MPI, and a world of two."""
    folder = Path(other.command[0]).parent
    other.environ["PATH"] = f"{folder}:{other.environ['PATH']}"
    own = other.command
    other.command = (str(folder / "mpirun"), "-n", "1", *own)
    code, out, err = other.run("-np", "2", "--no-tune", program("speak.py"))
    assert code == 0, err
    assert len(re.findall(r'"rank": "[01]"', out)) == 2
    other.command = (str(folder / "mpirun"), "-n", "2", *own)
    code, out, err = other.run("--no-tune", program("environ.py"), "PMI_RANK")
    assert code == 0, err
    assert sorted(out.splitlines()) == ['{"PMI_RANK": "0"}', '{"PMI_RANK": "1"}']
    assert "already rank 0 of 2, started by " in err


def test_the_dry_run_names_what_is_forgotten(shell: Shell) -> None:
    alone = {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "0"}
    code, out, _ = shell.run("-np", "2", "--dry-run", program("speak.py"), **alone)
    assert code == 0
    assert "variables of another launcher removed from it: PMI_RANK PMI_SIZE RANK\n" in out


@pytest.mark.ranks
def test_torchrun_with_one_process(shell: Shell, forks: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", "--no-python")
    (shell.home / "train.py").write_text(TRAIN)
    shell.command = (*torchrun, *shell.command)
    code, out, err = shell.run("-np", "2", FORK, "train.py", **{fork_server.VARIABLE: str(forks)})
    assert code == 0, err
    assert len(re.findall(r"rank [01] of 2: ", out)) == 6
