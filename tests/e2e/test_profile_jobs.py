"""Profiles of real jobs: once for plans of any size, as files, with and without the cache."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from job import DEBUG, FORK, FROM_CACHE, PLANNED, Job
from job_cache import in_cache, keys_of

from rannd.daemon.client.cache import Client
from rannd.profile.graph_profile import GraphProfile, decode, encode
from rannd.profile.points import Measured

pytestmark = pytest.mark.ranks

TUTORIAL = ("examples/tutorial.py", "64", "512", "6")


def profiles(job: Job) -> int:
    """How many blocks the daemon keeps."""
    return len(re.findall(r"^profile\t", job.run("rannc-cache", "ls"), re.MULTILINE))


@pytest.mark.full
def test_one_profile_is_enough_for_all_sizes(job: Job, tmp_path: Path) -> None:
    output = job.alone("tests/e2e/programs/profiling.py", "16")
    blocks = {int(number) for number in re.findall(r"rank 0: (\d+) blocks, rows \(1, 4, 16\)", output)}
    assert len(blocks) == 1, output
    kept = profiles(job)
    assert kept == blocks.pop()
    for ranks, rows in ((2, "5"), (3, "16")):
        output = job.train(ranks, "tests/e2e/programs/profiling.py", rows)
        assert output.count("blocks, rows (1, 4, 16)") == ranks
        assert PLANNED in output, "planned, for this number of ranks and rows"
        assert profiles(job) == kept


@pytest.mark.full  # as tests/profile/test_grains.py, in a job
def test_a_deeper_model_of_the_same_layers_needs_nothing_new(job: Job) -> None:
    for depth in (4, 8, 40):
        output = job.train(2, "tests/e2e/programs/profiling.py", "16", str(depth))
        assert PLANNED in output
        if depth == 4:
            kept = profiles(job)
        assert profiles(job) == kept >= 2


@pytest.mark.long
def test_a_profile_as_a_file(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "times.profile"
    variables = {"RANNC_GRAPH_PROFILE_FILE": str(file), "RANNC_CACHE": "off"}
    output = job.train(2, *TUTORIAL, RANNC_SAVE_GRAPH_PROFILE="true", **variables)
    written = decode(file.read_bytes())
    assert f"Wrote the times of {len(written.blocks)} blocks to {file}" in output
    # Its times are what plans are made of: with other ones, of another device and noisy, another plan is made.
    slow = {
        key: msgspec.structs.replace(
            block, points=tuple(msgspec.structs.replace(point, forward_us=5e6, spread=0.2) for point in block.points)
        )
        for key, block in written.blocks.items()
    }
    other = GraphProfile(written.format, "abacus", written.rannd, written.torch, written.flags, slow)
    file.write_bytes(encode(other))
    output = job.train(2, *TUTORIAL, RANNC_LOAD_GRAPH_PROFILE="true", **variables, **DEBUG)
    assert f"The times in {file} were measured on abacus" in output
    times = [float(number) for number in re.findall(r"fwd_time=(\d+)", output)]
    assert max(times) > 1e6, output

    planned = job.run(
        *("rannc-run", "--plan-only", "-np", "4", FORK, *TUTORIAL),
        RANNC_LOAD_GRAPH_PROFILE="true",
        **variables,
        **DEBUG,
    )
    assert f"The times in {file} were measured on abacus" in planned
    assert max(float(number) for number in re.findall(r"fwd_time=(\d+)", planned)) > 1e6
    fewer = {key: msgspec.structs.replace(block, points=block.points[-1:]) for key, block in slow.items()}
    file.write_bytes(encode(msgspec.structs.replace(other, blocks=fewer)))
    output = job.train(2, *TUTORIAL, RANNC_LOAD_GRAPH_PROFILE="true", **{**variables, "RANNC_CACHE": "on"})
    assert PLANNED in output

    def look(client: Client) -> None:
        stored = [msgspec.msgpack.decode(client.get(key) or b"", type=Measured) for key in keys_of(job, "profile")]
        assert all(point.forward_us < 5e6 for measured in stored for point in measured.points), "an abacus is slower"

    in_cache(job, monkeypatch, look)
    file.write_bytes(encode(other))
    output = job.train(2, *TUTORIAL, code=1, RANNC_SAVE_GRAPH_PROFILE="true", **variables)
    assert "has times of abacus" in output
    assert decode(file.read_bytes()) == other, "nothing is lost"
    file.write_bytes(b"something else")
    output = job.train(2, *TUTORIAL, code=1, RANNC_LOAD_GRAPH_PROFILE="true", **variables)
    assert f"{file}: not a graph profile of this version of rannd" in output
    assert file.read_bytes() == b"something else"


@pytest.mark.full
def test_a_file_is_written_where_the_deployment_is_known_too_and_its_content_is_part_of_the_key(
    job: Job, tmp_path: Path
) -> None:
    job.train(2, *TUTORIAL)
    file = tmp_path / "times.profile"
    output = job.train(2, *TUTORIAL, RANNC_SAVE_GRAPH_PROFILE="true", RANNC_GRAPH_PROFILE_FILE=str(file))
    assert FROM_CACHE in output
    known = decode(file.read_bytes())
    assert known.blocks
    variables = {"RANNC_GRAPH_PROFILE_FILE": str(file), "RANNC_LOAD_GRAPH_PROFILE": "true"}
    output = job.train(2, *TUTORIAL, **variables)
    assert f"Using times of this model's blocks from {file}" in output
    assert " were measured on " not in output
    assert PLANNED in output
    assert FROM_CACHE in job.train(2, *TUTORIAL, **variables)
    file.write_bytes(encode(msgspec.structs.replace(known, blocks={})))
    assert PLANNED in job.train(2, *TUTORIAL, **variables)


@pytest.mark.full
def test_operators_are_measured_and_added_up(job: Job, tmp_path: Path) -> None:
    """Layers of a product and what follows it are measured together, or the operators alone."""
    found = {}
    for apart in ("false", "true"):
        file = tmp_path / f"apart_{apart}.profile"
        output = job.train(
            2,
            "tests/e2e/programs/profiling.py",
            "16",
            RANNC_PROFILE_BY_ACC=apart,
            RANNC_CACHE="off",
            RANNC_PARTITION_NUM="1",
            RANNC_SAVE_GRAPH_PROFILE="true",
            RANNC_GRAPH_PROFILE_FILE=str(file),
            **DEBUG,
        )
        assert "no effect" not in output
        found[apart] = decode(file.read_bytes()).blocks
        (took,) = (float(number) for number in re.findall(r"fwd_time=(\d+)", output))
        assert took > 0
    whole, apart = found["false"], found["true"]
    assert set(whole) - set(apart), "layers of several operators"
    assert set(apart) < set(whole), "for more devices than there are layers"
    kept = [max(block.points[-1].activation_bytes for block in each.values()) for each in (whole, apart)]
    assert kept[0] >= kept[1] > 0
