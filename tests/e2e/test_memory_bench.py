"""bench/memory.py: with a small model it measures what it says of a larger one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from job import Job
from kept_results import KEPT, goals, tables

SMALL = ("--ranks", "2", "--layers", "1", "--width", "64", "--words", "512", "--length", "32", "--rows", "2")


@pytest.mark.full
@pytest.mark.ranks
def test_what_is_offloaded_is_not_in_memory(job: Job, tmp_path: Path) -> None:
    large, kept = (*SMALL, "--width", "256", "--words", "2048"), tmp_path / "kept"
    job.run(sys.executable, "bench/memory.py", "offload", "--rounds", "2", "--steps", "1", *large, **{KEPT: str(kept)})
    rows = tables(kept)["What is in files between steps, one rank"]
    for name, parts in (("in memory", ""), ("state", "o"), ("parameters", "pg"), ("both", "pgo")):
        mine = [row for row in rows if row["offloaded"] == name]
        assert sorted(row["what"][0] for row in mine) == ["g", "o", "p"]
        for row in mine:
            here = row["in memory"]
            assert here <= 0.02 * row["size"] if row["what"][0] in parts else here == row["size"], row
        # as much again is planned for gradients that wait
        planned = sum(row["size"] * (1 + (row["what"][0] == "g")) for row in mine if row["what"][0] in parts)
        assert mine[0]["planned elsewhere, of all"] == pytest.approx(planned, rel=0.02)
    assert len(goals(kept)["offload"]) == 4


@pytest.mark.full
@pytest.mark.ranks
def test_zero_divides_state_and_trains_where_nothing_else_fits(job: Job, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job.run(sys.executable, "bench/memory.py", "bytes", "fit", *SMALL, **{KEPT: str(kept)})
    found = tables(kept)
    assert goals(kept)["zero-bytes"][0] <= 0.02
    whole, *shared = found["Bytes of tensors between steps and at the peak of one, 2 ranks"]
    assert whole["ZeRO"] == "ZeRO 0"
    (third, *_) = [row for row in shared if row["ZeRO"] == "ZeRO 3"]
    for part in ("parameters", "gradients", "optimizer"):
        assert third[part] == pytest.approx(whole[part] / 2, rel=0.02)
    one, several = found["A limit that one stage without ZeRO does not keep, 2 ranks"]
    assert (one["asked for"], several["asked for"]) == ("one stage", "any stages")
    assert "ZeRO " in one["plan"]
    assert all(row["peak"] <= row["limit"] and row["last loss"] < row["first loss"] for row in (one, several))


@pytest.mark.full
@pytest.mark.ranks
def test_a_third_of_the_training_state_is_memory_enough(job: Job, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    job.run(sys.executable, "bench/memory.py", "larger", "--layers", "8", **{KEPT: str(kept)})
    ((row,),) = tables(kept).values()
    assert row["most"] <= row["limit"] <= row["training state"] / 3 + 1
