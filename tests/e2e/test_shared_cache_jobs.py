"""Several jobs and one daemon: what one makes the others have; and a run that misses says why."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from job import FORK, FROM_CACHE, PLANNED, Job

pytestmark = pytest.mark.ranks

TUTORIAL = ("examples/tutorial.py", "64", "256", "4")
ANEW = "No cached deployment fits: "


def test_two_jobs_at_once_make_one_plan(job: Job) -> None:
    job.run("rannc-cache", "clear")
    with ThreadPoolExecutor(2) as both:
        outputs = list(both.map(lambda _: job.train(2, *TUTORIAL), range(2)))
    assert sorted(output.count(PLANNED) for output in outputs) == [0, 1]
    assert sorted(output.count(FROM_CACHE) for output in outputs) == [0, 1]
    entries = json.loads(job.run("rannc-cache", "ls", "--json"))
    assert [entry["kind"] for entry in entries].count("deployment") == 1


def test_a_run_that_plans_again_says_why(job: Job) -> None:
    job.run("rannc-cache", "clear")
    assert ANEW not in job.train(2, *TUTORIAL), "a model that was never seen needs no explanation"
    known = job.train(2, *TUTORIAL)
    assert ANEW not in known
    again = job.train(2, *TUTORIAL, RANNC_MEM_MARGIN="0.25")
    (line,) = re.findall(rf"{ANEW}(.*)", again)
    size = r"[\d.]+ GiB"
    assert re.fullmatch(rf"device memory {size} -> {size}, mem_margin 0.1 -> 0.25 \(rannc-cache why --last\)", line)
    assert "plan.mem_margin" in job.run("rannc-cache", "why", "--last")


SWAP = """
import json, sys
import msgspec
from rannd.daemon.client.cache import connect
from rannd.daemon.common import keys
from rannd.plan import deployment
entry = json.loads(sys.argv[1])
key = keys.Key("deployment", entry["key"], entry["components"])
client = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)
found = deployment.decode(client.get(key))
first, second = found.stages
swapped = [msgspec.structs.replace(one, ops=other.ops) for one, other in ((first, second), (second, first))]
assert client.put(key, deployment.encode(msgspec.structs.replace(found, stages=tuple(swapped))))
"""


def test_a_cached_plan_that_cannot_be_run_is_made_again(job: Job) -> None:
    """Only another program can have stored it."""
    job.run("rannc-cache", "clear")
    variables = {"RANNC_PARTITION_NUM": "2"}
    assert PLANNED in job.train(2, *TUTORIAL, **variables)
    entries = json.loads(job.run("rannc-cache", "ls", "--json"))
    (entry,) = (entry for entry in entries if entry["kind"] == "deployment")
    job.run(sys.executable, "-c", SWAP, json.dumps(entry))
    again = job.train(2, *TUTORIAL, **variables)
    assert "The cached deployment cannot be used: " in again
    assert PLANNED in again
    assert FROM_CACHE in job.train(2, *TUTORIAL, **variables)


@pytest.mark.long
def test_the_daemons_progress_is_shown_by_who_waits(job: Job) -> None:
    """A third process holds the lease of the job's plan, and says what it does."""
    job.run("rannc-cache", "clear")
    made = job.train(2, *TUTORIAL)
    assert PLANNED in made
    entries = json.loads(job.run("rannc-cache", "ls", "--json"))
    (deployment,) = (entry for entry in entries if entry["kind"] == "deployment")
    holder = f"""
import json, subprocess, sys
from rannd.daemon.common import keys
from rannd.daemon.client.cache import Lease, connect
client = connect(mode="refresh", timeout_s=60, idle_s=600, max_bytes=1 << 30)
key = keys.Key("deployment", {deployment["key"]!r}, json.loads({json.dumps(deployment["components"])!r}))
lease = client.lease(key, 0, who="rank 0 of job 4711")
assert isinstance(lease, Lease)
lease.progress("profiling, 40 %")
value = connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30).get(key)
connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30).discard(key, "made again")
command = ["rannc-run", "-np", "2", *sys.argv[1:]]
job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
for line in job.stdout:
    print(line, end="")
    if "waiting for it" in line and "profiling" in line:
        client.put(key, value)
lease.release()
sys.exit(job.wait())
"""
    output = job.run("python", "-c", holder, FORK, *TUTORIAL)
    assert re.search(r"rank 0 of job 4711 is profiling, 40 %, for .* so far; waiting for it", output)
    assert PLANNED not in output
    assert FROM_CACHE in output


@pytest.mark.long
def test_links_that_cannot_be_are_measured_again(job: Job) -> None:
    job.run("rannc-cache", "clear")
    assert PLANNED in job.train(2, *TUTORIAL)
    entries = {entry["kind"]: entry for entry in json.loads(job.run("rannc-cache", "ls", "--json"))}
    change = f"""
import json, math, msgspec
from rannd.daemon.client.cache import connect
from rannd.daemon.common.keys import Key
entries = json.loads({json.dumps(entries)!r})
links, deployment = (Key(kind, entries[kind]["key"], entries[kind]["components"]) for kind in ("links", "deployment"))
with connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30) as client:
    client.discard(deployment, "made again")
    within, between = msgspec.msgpack.decode(client.get(links))
    assert between is None
    assert client.put(links, msgspec.msgpack.encode(([math.inf, *within[1:]], None)))
"""
    job.run("python", "-c", change)
    output = job.train(2, *TUTORIAL)
    assert re.search(r"The cached links cannot be used: Expected `float` <= 1000000000.0", output), output
    assert PLANNED in output
    assert ANEW not in output
    known = job.train(2, *TUTORIAL)
    assert FROM_CACHE in known


def test_a_failed_plan_is_not_kept(job: Job) -> None:
    job.run("rannc-cache", "clear")
    assert "no plan fits" in job.train(2, *TUTORIAL, code=1, RANNC_MEM_LIMIT_GB="0.0005")
    assert '"deployment"' not in job.run("rannc-cache", "ls", "--json")
    assert '"leases": []' in job.run("rannd", "status", "--json")


@pytest.mark.long
def test_a_container_that_shares_the_home_alone_runs_uncached(job: Job, tmp_path: Path) -> None:
    """Its runtime directory is another one, so it cannot see the daemon that holds the store."""
    known = job.train(2, *TUTORIAL)
    other = tmp_path / "run"
    other.mkdir(mode=0o700)
    output = job.train(2, *TUTORIAL, XDG_RUNTIME_DIR=str(other))
    assert len(re.findall(r"is held by another process, perhaps in another container", output)) >= 1
    assert "from the cache" not in output
    assert sorted(re.findall("Finished on rank.", output)) == sorted(re.findall("Finished on rank.", known))
    assert not list(other.glob("rannd/*.sock"))
