"""Hosts that batch systems name, in their own writing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rannd.errors import UsageError
from rannd.runner.resources.allocation import HOSTFILE_VARIABLES, expand_counts, expand_nodelist, find_allocation
from rannd.runner.resources.host_list import Host


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("node[01-03,7],b2", "node01 node02 node03 node7 b2"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("r[1-2]c[1-2]", "r1c1 r1c2 r2c1 r2c2"),
        ("gpu-[1,3]-ib.site.org", "gpu-1-ib.site.org gpu-3-ib.site.org"),
        ("n[5]", "n5"),
        ("10.0.0.[1-2]", "10.0.0.1 10.0.0.2"),
    ],
)
def test_node_lists(text: str, nodes: str) -> None:
    assert expand_nodelist(text, "X") == nodes.split()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no node at ''"),
        (",a", "no node at ',a'"),
        ("a,", "no node at ''"),
        ("a,,b", "no node at ',b'"),
        ("a[1-2", r"no comma at '\[1-2'"),
        ("a1-2]", "no comma at"),
        ("a[]", "'' is not a number or range"),
        ("a[1-]", "'1-' is not a number or range"),
        ("a[x]", "'x' is not a number or range"),
        ("a[3-1]", "'3-1' is not a range"),
        ("a[1-9999999999]", "is not a range"),
        ("a[1-9999]b[1-9999]", "too many nodes"),
        ("a[1,1]", "a node is named twice"),
        ("a b", "no comma at ' b'"),
        ("a[1[2]]", "no comma at"),
    ],
)
def test_what_is_no_node_list(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"is not understood \(.*{why}.*name the hosts yourself: --hosts") as error:
        expand_nodelist(text, "SLURM_JOB_NODELIST")
    assert str(error.value).startswith(f"SLURM_JOB_NODELIST={text} ")


_ranges = st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(1, 4))


@given(st.lists(_ranges, min_size=1, max_size=4), st.text("abz-.", min_size=1, max_size=4), st.text("xy.-", max_size=3))
def test_ranges_are_what_they_say(ranges: list[tuple[int, int, int]], before: str, after: str) -> None:
    parts, nodes = [], []
    for first, more, width in ranges:
        parts.append(f"{first:0{width}d}-{first + more:0{width}d}")
        nodes += [f"{before}{number:0{width}d}{after}" for number in range(first, first + more + 1)]
    text = f"{before}[{','.join(parts)}]{after}"
    if len(set(nodes)) == len(nodes):
        assert expand_nodelist(text, "X") == nodes
    else:
        with pytest.raises(UsageError, match="named twice"):
            expand_nodelist(text, "X")


def test_counts() -> None:
    assert expand_counts("2(x3),1", "X") == [2, 2, 2, 1]
    assert expand_counts("4", "X") == [4]
    assert expand_counts("1,8(x2)", "X") == [1, 8, 8]


@pytest.mark.parametrize("text", ["", "0", "2(3)", "2(x)", "a", "1,,2", "2x3", "-1", "2(x0)", "9999999"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError, match=r"SLURM_TASKS_PER_NODE=.* not understood \('.*' is not a number of tasks\)"):
        expand_counts(text, "SLURM_TASKS_PER_NODE")


def hosts(**environ: str) -> dict[str, int]:
    found = find_allocation(environ)
    assert found is not None
    return {host.name: host.slots for host in found.hosts}


def test_no_allocation() -> None:
    assert find_allocation({}) is None
    assert find_allocation({"SLURM_JOB_ID": "1", "PBS_NODEFILE": "", "HYDRA_HOST_FILE": ""}) is None


def test_slurm_counts_tasks_where_somebody_asked_for_them() -> None:
    nodes = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1", "SLURM_GPUS_ON_NODE": "8"}
    assert hosts(**nodes, SLURM_NTASKS="5") == {"n1": 2, "n2": 2, "n3": 1}
    assert hosts(**nodes, SLURM_NTASKS_PER_NODE="2") == {"n1": 2, "n2": 2, "n3": 1}
    assert hosts(**nodes) == {"n1": 8, "n2": 8, "n3": 8}
    assert hosts(**{**nodes, "SLURM_GPUS_ON_NODE": "0"}) == {"n1": 2, "n2": 2, "n3": 1}


def test_slurm_that_says_little() -> None:
    assert hosts(SLURM_JOB_NODELIST="a,b", SLURM_NTASKS_PER_NODE="3") == {"a": 3, "b": 3}
    assert hosts(SLURM_JOB_NODELIST="a,b") == {"a": 1, "b": 1}
    found = find_allocation({"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "2(x2)"})
    assert found is not None
    assert found.slurm
    assert found.origin == "SLURM_JOB_NODELIST=a,b, SLURM_TASKS_PER_NODE=2(x2)"


def test_slurm_that_contradicts_itself() -> None:
    with pytest.raises(
        UsageError, match=r"TASKS_PER_NODE=2\(x3\): 2 nodes, but numbers of tasks for 3; name the hosts"
    ):
        hosts(SLURM_JOB_NODELIST="a,b", SLURM_TASKS_PER_NODE="2(x3)")


def test_a_file_of_pbs_repeats_a_host_for_each_slot(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("n1\nn2\nn1\nn3\nn1\n")
    assert list(hosts(PBS_NODEFILE=str(file)).items()) == [("n1", 3), ("n2", 1), ("n3", 1)]
    file.write_text("\n")
    with pytest.raises(UsageError, match="names no host; name the hosts yourself"):
        hosts(PBS_NODEFILE=str(file))
    file.unlink()
    with pytest.raises(UsageError, match=r"PBS_NODEFILE=.* cannot be read"):
        hosts(PBS_NODEFILE=str(file))


@pytest.mark.parametrize("name", HOSTFILE_VARIABLES)
def test_a_host_file_of_mpi(tmp_path: Path, name: str) -> None:
    """As Kubernetes' MPI operator writes it, for Open MPI and for the others."""
    file = tmp_path / "hostfile"
    for text in ("j-worker-0.j.ns.svc slots=2\nj-worker-1.j.ns.svc slots=2\n", "j-worker-0.j.ns.svc:2\nb:1\n"):
        file.write_text(text)
        found = find_allocation({name: str(file), "SLURM_JOB_NODELIST": "n1"})
        assert found is not None
        assert found.origin == f"{name}={file}"
        assert found.hosts[0] == Host("j-worker-0.j.ns.svc", 2)
        assert not found.slurm
    file.write_text("a max_slots=2\n")
    with pytest.raises(UsageError, match=rf"{name}=.*:1: 'max_slots=2' is not understood.*or name the hosts yourself"):
        find_allocation({name: str(file)})
