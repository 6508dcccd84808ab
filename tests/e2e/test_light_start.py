"""What a job does not import where its trace and its deployment are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job import Job

pytestmark = pytest.mark.ranks

TRACING = {"torch._dynamo", "torch._inductor", "torch.export._trace", "rannd.graph.tracing.export"}
NEVER = {"mpi4py.MPI", "torch.distributed.fsdp", "torch.testing", "triton"}
PROGRAM = str(Path(__file__).parent / "programs" / "cached_imports.py")


@pytest.mark.long
def test_a_cached_run_imports_nothing_that_traces(job: Job, tmp_path: Path) -> None:
    imported: list[list[set[str]]] = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        job.run("rannc-run", "-np", "2", PROGRAM, str(folder))
        imported.append([set(json.loads((folder / str(rank)).read_text())) for rank in range(2)])
    planned, cached = imported
    for rank in range(2):
        assert planned[rank] >= TRACING, "a run that traces imports them"
        assert not (TRACING | NEVER) & cached[rank]
