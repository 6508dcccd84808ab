"""The size of a job and the places of its ranks: hosts of the user, of a batch system, or this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rannd.errors import UsageError
from rannd.runner.rank_placement import RankPlacement, decide
from rannd.runner.resources.host_list import Host
from rannd.runner.run_options import Options

HERE = os.uname().nodename.split(".")[0]
TWO = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS": "4"}


def where(environ: dict[str, str], *, srun: bool = False, devices: int = 0, **options: object) -> RankPlacement:
    asked = Options(command=("x.py",), **options)  # type: ignore[arg-type]
    return decide(asked, environ, default=3, devices=devices, srun=srun)


def hosts_of(placement: RankPlacement) -> list[str]:
    return [place.host for place in placement.places]


def test_this_machine() -> None:
    found = where({})
    assert (found.size, hosts_of(found), found.hosts, found.origin) == (3, [HERE] * 3, [], "")
    assert where({}, size=5).size == 5


def test_named_hosts(tmp_path: Path) -> None:
    found = where(TWO, hosts="a:2,b:1")
    assert (found.size, hosts_of(found), found.origin) == (3, ["a", "a", "b"], "--hosts")
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n")
    assert where(TWO, hostfile=file, size=1).hosts == [Host("a", 2)]
    with pytest.raises(UsageError, match="-np 4 asks for more ranks than the hosts have slots"):
        where(TWO, hosts="a:2,b:1", size=4)


def test_named_hosts_that_are_this_machine() -> None:
    assert where({}, hosts="localhost:2").hosts == []
    # A launcher that knows of other nodes would use them, unless it is told.
    assert where(TWO, hosts="localhost:2").hosts == [Host("localhost", 2)]
    # Hosts that are named are the way around a batch system that is not understood.
    assert where({"SLURM_JOB_NODELIST": "n[1"}, hosts="localhost:2").size == 2
    with pytest.raises(UsageError, match="is not understood"):
        where({"SLURM_JOB_NODELIST": "n[1"})


def test_nodes_of_a_batch_system() -> None:
    found = where(TWO)
    assert (found.size, hosts_of(found)) == (4, ["n1", "n1", "n2", "n2"])
    assert found.hosts == [Host("n1", 2), Host("n2", 2)]
    assert found.origin == "SLURM_JOB_NODELIST=n[1-2], SLURM_TASKS_PER_NODE=2(x2)"
    fewer = where(TWO, size=2)
    assert (hosts_of(fewer), fewer.hosts) == (["n1", "n1"], [Host("n1", 2)])
    with pytest.raises(UsageError, match=r"-np 5 asks for more .* gives slots \(4, from SLURM_.*: --hosts n1:3,n2:3$"):
        where(TWO, size=5)


def test_srun_knows_its_nodes_itself() -> None:
    found = where(TWO, srun=True, size=2)
    assert found.by_srun
    assert found.hosts == [Host("n1", 2), Host("n2", 2)], "for the way back from them"
    assert not where(TWO, srun=True, hosts="n1:2").by_srun
    assert not where({"PBS_NODEFILE": "/dev/null"}, srun=True, hosts="n1:2").by_srun


def test_one_node_of_a_batch_system_that_is_this_machine() -> None:
    one = {"SLURM_JOB_NODELIST": HERE, "SLURM_TASKS_PER_NODE": "4", "SLURM_NTASKS": "4"}
    found = where(one)
    assert (found.size, hosts_of(found), found.hosts) == (4, [HERE] * 4, [])
    assert where(one, size=6).size == 6
    # One task, as in a shell of srun --pty, says nothing of how many ranks there may be.
    assert where({**one, "SLURM_TASKS_PER_NODE": "1"}).size == 3


def test_a_plan_is_made_by_one_rank() -> None:
    assert (where({}, plan_only=True).size, len(where({}, plan_only=True).places)) == (3, 1)
    assert where({}, plan_only=True, devices=8).size == 8
    assert where({}, plan_only=True, devices=8, size=64).size == 64
    found = where(TWO, plan_only=True)
    assert (found.size, hosts_of(found), found.hosts) == (4, ["n1"], [Host("n1", 1)])
    here = where({**TWO, "SLURM_JOB_NODELIST": f"n1,{HERE}"}, plan_only=True)
    assert here.hosts == [Host(HERE, 1)]
    assert where({"SLURM_JOB_NODELIST": "n[1"}, plan_only=True).hosts == []


def test_a_plan_needs_no_hosts_but_counts_those_of_the_configuration() -> None:
    with pytest.raises(UsageError, match="--plan-only needs no hosts"):
        where({}, plan_only=True, hosts="a:4")
    variable = {"hosts": "RANNC_HOSTS", "hostfile": "default"}
    found = where({}, plan_only=True, hosts="a:4,b:4", origins=variable)
    assert (found.size, hosts_of(found), found.hosts) == (8, [HERE], [])
    with pytest.raises(UsageError, match=r"^RANNC_HOSTS: --hosts a:x: 'a:x' is not a host"):
        where({}, hosts="a:x", origins=variable)
