"""Copies of parts on other hosts: whole ones arrive, and what cannot be sent or kept leaves the others alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from thinned import first

from rannd.runtime.elastic.neighbours import keepers

RANK = """
import os, sys
from dataclasses import dataclass
from types import SimpleNamespace
import torch.distributed as dist
from rannd.ranks import memory_files
from rannd.ranks.memory_files import KeptPart
from rannd.runtime.elastic import neighbours
from rannd.runtime.failure.detector import FailureDetector

neighbours._CHUNK = 1000
folder, rank, nodes, fault = sys.argv[1], int(sys.argv[2]), [int(each) for each in sys.argv[3]], sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", len(nodes)), rank=rank, world_size=len(nodes))
slots = [SimpleNamespace(node=node) for node in nodes]
names = [f"host{node}" for node in nodes]
world = SimpleNamespace(
    rank=rank, size=len(nodes), hosts=names, slots=slots, rank_of_slot=range(len(nodes)), watch=FailureDetector()
)
world.beside = lambda call: SimpleNamespace(control=dist.new_group(backend="gloo"))
copying = neighbours.Neighbours(world)
files = memory_files.make()
for number in range(4):
    own, copies = files[number % 2], files[2 + number % 2]
    length = 0 if number == 3 else 5000 + 777 * rank + number
    part = KeptPart(number, 10 + number, rank, len(nodes), folder, ["file"], [length])
    os.ftruncate(own, 0)
    if not (fault == "nothing" and rank == 1 and number == 2):
        os.pwrite(own, part.prefix() + bytes([rank]) * length, 0)
        memory_files.set_whole(own, 0)
    if fault == "full" and rank == 0 and number == 2:
        copies = os.open("/dev/null", os.O_RDONLY)
    copying.begin(own, copies)
    copying.join()
    found = {}
    for place, each in memory_files.records(copies) if copies in files else ():
        assert os.pread(copies, each.lengths[0], place) == bytes([each.rank]) * each.lengths[0]
        found[each.rank] = (each.number, each.lengths[0])
    print(number, sorted(found.items()), copying.error)
dist.barrier()
"""


def test_keepers_are_on_the_next_node_and_spread() -> None:
    assert keepers([0, 0, 1, 1]) == [2, 3, 0, 1]
    assert keepers([0, 1, 2]) == [1, 2, 0]
    assert keepers([0, 0, 0, 1]) == [3, 3, 3, 0]
    assert keepers([1, 0, 1, 0]) == [1, 0, 3, 2]
    assert keepers([0, 0]) == [None, None]


def run(folder: Path, nodes: str, fault: str) -> list[list[str]]:
    """What each rank prints, a line for each step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(folder), str(rank), nodes, fault],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(nodes))
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * len(nodes)
    return [output.splitlines() for output in outputs]


def size(rank: int, number: int) -> int:
    return 5000 + 777 * rank + number


@pytest.mark.parametrize("nodes", first(1, ["0001", "012"]))
def test_each_part_is_with_its_keeper(tmp_path: Path, nodes: str) -> None:
    chosen = keepers([int(each) for each in nodes])
    for rank, lines in enumerate(run(tmp_path, nodes, "none")):
        sources = [other for other, keeper in enumerate(chosen) if keeper == rank]
        for number, line in enumerate(lines):
            kept = [(other, (number, size(other, number) if number < 3 else 0)) for other in sources]
            assert line == f"{number} {kept} "


def test_a_rank_that_has_nothing_to_send(tmp_path: Path) -> None:
    lines = run(tmp_path, "012", "nothing")
    assert lines[2][2] == "2 [] ", "rank 2 keeps what rank 1 has"
    assert lines[0][2] == f"2 [(2, (2, {size(2, 2)}))] "
    assert lines[1][2] == f"2 [(0, (2, {size(0, 2)}))] "
    assert lines[2][3] == "3 [(1, (3, 0))] ", "the next step is kept again"


def test_a_keeper_without_memory_is_told_of(tmp_path: Path) -> None:
    lines = run(tmp_path, "012", "full")
    assert lines[0][2].startswith("2 [] rank 0 on host0: ")
    assert lines[2][2] == f"2 [(1, (2, {size(1, 2)}))] rank 0 on host0 has no memory"
    assert lines[1][2] == f"2 [(0, (2, {size(0, 2)}))] "
