"""The command `rannc-cache`, as a user types it."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import time
from pathlib import Path

import click
import msgspec
import pytest
from cache_command import BIN, PROFILES, cache, client, deployment, on_terminal
from plan_graphs import chain
from plan_instances import deploy

from rannd.daemon.cli import main as rannd
from rannd.daemon.common.keys import digest_of, measured_key
from rannd.daemon.common.paths import places
from rannd.daemon.common.protocol import COMPRESSED, NewEntry
from rannd.errors import DeploymentError
from rannd.plan.deployment import Deployment, encode
from rannd.plan.measured_step import (
    MEASURED_FORMAT,
    MeasuredStep,
    RankTimes,
    StageTimes,
    Typical,
    encode_measured,
)
from rannd.plan.plan_text import show, show_measured
from rannd.runner.cache.cache_command import main as rannc_cache
from rannd.runner.cache.entries import date, greeted
from rannd.runner.page.terminal_drawing import drawn

DEPLOYMENT = deployment(64)


@pytest.fixture
def filled(daemon_home) -> object:
    with client() as job:
        assert job.put_many([(key, bytes(100)) for key in PROFILES]) == 100
        assert job.put(DEPLOYMENT, bytes(2048))
    return daemon_home


def test_an_empty_cache(daemon_home) -> None:
    assert cache("ls").stdout == "KIND\tKEY\tAGE\tLAST USED\tSIZE\tWHAT\n"
    assert json.loads(cache("ls", "--json").stdout) == []
    assert on_terminal("ls") == "the cache is empty\n"
    assert cache("clear").stdout == "removed 0 entries, 0 B\n"


def test_ls_for_programs_is_complete(filled) -> None:
    lines = cache("ls").stdout.splitlines()
    assert len(lines) == 102
    kind, key, _, _, size, what = next(line for line in lines if line.startswith("deployment")).split("\t")
    assert (kind, key, size) == ("deployment", DEPLOYMENT.digest, "2.0 KiB")
    assert what == "graph abcdef01, ranks 2, batch 64, on cpu, over gloo"
    told = json.loads(cache("ls", "--json").stdout)
    assert {entry["key"] for entry in told} == {key.digest for key in (*PROFILES, DEPLOYMENT)}
    assert all(entry["components"] for entry in told)


def test_ls_for_people_fits_their_terminal(filled) -> None:
    told = on_terminal("ls")
    assert DEPLOYMENT.short in told
    assert DEPLOYMENT.digest not in told
    assert "101 entries, 11.8 KiB" in told
    assert max(map(len, told.splitlines())) <= 80


def test_ls_on_a_narrow_terminal_takes_one_line_for_an_entry(filled) -> None:
    told = on_terminal("ls", "--kind", "deployment", columns=60).splitlines()
    assert max(map(len, told)) <= 60
    line = next(line for line in told if DEPLOYMENT.short in line)
    assert "2.0 KiB" in line
    assert line.rstrip().endswith("…")
    assert "graph ab" in line
    assert len(told) == 3  # with heads and total
    assert "over gloo" in on_terminal("ls", "--kind", "deployment", columns=200)


def test_texts_of_imported_entries_are_shown_and_not_obeyed(daemon_home) -> None:
    """Neither by the terminal nor by rich; a value of somebody else may come with any components."""
    session = greeted()
    for number in "12":
        texts = {"graph": "a\x1b]0;b\x07c", "device_model": "[/bold]\x1b[31m" + number}
        session.put([NewEntry(digest_of("deployment", texts), "deployment", texts, b"x")], "1\x1b[31m")
    session.close()
    key, other = (entry["key"] for entry in json.loads(cache("ls", "--json").stdout))
    assert "[/bold]" in on_terminal("ls")
    for words in (("ls",), ("show", key), ("why", key, other), ("clear", key)):
        told = cache(*words).stdout
        assert "[31m" in told
        assert "\x1b" not in told, words


def test_ls_shows_the_latest_used_first(filled) -> None:
    with client() as job:
        job.get(PROFILES[42])
    assert cache("ls").stdout.splitlines()[1].split("\t")[1] == PROFILES[42].digest


def test_ls_of_a_kind(filled) -> None:
    lines = cache("ls", "--kind", "deployment").stdout.splitlines()
    assert [line.split("\t")[0] for line in lines] == ["KIND", "deployment"]
    assert len(json.loads(cache("ls", "--kind", "profile", "--json").stdout)) == len(PROFILES)
    told = cache("ls", "--kind", "plan")
    assert told.returncode == 2
    assert "there is no such kind of entry; kinds are" in told.stderr


def test_show(filled) -> None:
    told = cache("show", DEPLOYMENT.short)
    assert told.returncode == 0
    assert DEPLOYMENT.digest in told.stdout
    assert "components" not in told.stdout
    told = cache("show", DEPLOYMENT.short, "--key")
    assert '  inputs = [["x","float32",[64,512]]]\n' in told.stdout
    assert "  version.torch = " in told.stdout
    assert json.loads(cache("show", DEPLOYMENT.digest, "--json").stdout)["components"] == DEPLOYMENT.components


def test_ls_names_the_model_and_the_stages_of_deployments(daemon_home) -> None:
    """Of one that is older than such names, what its key has."""
    plan = deploy(chain(10), 2, partition_num=2)
    with client() as job:
        assert job.put(DEPLOYMENT, encode(msgspec.structs.replace(plan, model="GPT2LMHeadModel 11.1M")))
        assert job.put(deployment(65), encode(plan))
    whats = {line.split("\t")[1]: line.split("\t")[-1] for line in cache("ls").stdout.splitlines()}
    assert whats[DEPLOYMENT.digest] == "GPT2LMHeadModel 11.1M, 2 stages, ranks 2, batch 64, on cpu, over gloo"
    assert whats[deployment(65).digest] == "graph abcdef01, ranks 2, batch 65, on cpu, over gloo"


def test_show_of_a_deployment_begins_with_its_plan(daemon_home) -> None:
    plan = deploy(chain(10), 2)
    with client() as job:
        assert job.put(DEPLOYMENT, encode(plan))
        assert job.put(PROFILES[0], bytes(10))
    told = cache("show", DEPLOYMENT.short)
    assert told.returncode == 0
    assert told.stdout.startswith(f"{show(plan)}\n\n{drawn(plan)}\n\nkey        {DEPLOYMENT.digest}\n")
    entry = json.loads(cache("show", DEPLOYMENT.short, "--json").stdout)
    assert entry["components"] == DEPLOYMENT.components
    assert msgspec.convert(entry["deployment"], Deployment) == plan
    assert "deployment" not in json.loads(cache("show", PROFILES[0].digest, "--json").stdout)
    assert "cannot be shown" not in cache("show", PROFILES[0].digest).stdout


def test_show_of_a_deployment_that_ran_has_what_its_steps_took(daemon_home) -> None:
    """Beside the plan; an entry that cannot be of it is told, and the plan is shown all the same."""
    plan = deploy(chain(10), 2, partition_num=2)
    ranks = tuple(
        RankTimes(slot, 20, (StageTimes(slot, 2, Typical(9.0), Typical(8.0)),), (), 100.0, 1.0, 0, 0, 0, 0, 0)
        for slot in range(2)
    )
    measured = MeasuredStep(MEASURED_FORMAT, ranks)
    key = measured_key(DEPLOYMENT.digest)
    with client() as job:
        assert job.put(DEPLOYMENT, encode(plan))
        assert job.put(key, encode_measured(measured))
    told = cache("show", DEPLOYMENT.short).stdout
    took = show_measured(plan, measured)
    assert told.startswith(f"{show(plan)}\n\n{drawn(plan)}\n\n{took}\n\nkey        {DEPLOYMENT.digest}\n")
    entry = json.loads(cache("show", DEPLOYMENT.short, "--json").stdout)
    assert msgspec.convert(entry["measured"], MeasuredStep) == measured
    assert f"steps of {DEPLOYMENT.short}" in cache("ls").stdout
    with client() as job:
        assert job.put(key, encode_measured(msgspec.structs.replace(measured, ranks=ranks[:1])))
    told = cache("show", DEPLOYMENT.short).stdout
    assert told.startswith(show(plan))
    assert "What its steps took cannot be shown: not the measured times of this deployment: 1 ranks, of 2" in told
    assert json.loads(cache("show", DEPLOYMENT.short, "--json").stdout)["measured"] is None


def test_show_of_a_deployment_that_cannot_be_read_says_why(filled) -> None:
    told = cache("show", DEPLOYMENT.short)
    assert told.returncode == 0
    assert "The deployment cannot be shown: not a deployment of this version of rannd" in told.stdout
    assert json.loads(cache("show", DEPLOYMENT.short, "--json").stdout)["deployment"] is None


def test_a_key_that_names_nothing_or_too_much(filled) -> None:
    nothing = cache("show", "0" * 40)
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "starts with 0000" in nothing.stderr
    assert cache("show", "xyz!").returncode == 2
    short = cache("clear", "ab")
    assert short.returncode == 2
    assert "4 to 40 digits" in short.stderr


def test_clear_says_what_it_removed(filled) -> None:
    one = cache("clear", DEPLOYMENT.short).stdout.splitlines()
    assert one == [
        f"removed deployment {DEPLOYMENT.digest}  graph abcdef01, ranks 2, batch 64, on cpu, over gloo",
        "removed 1 entry, 2.0 KiB",
    ]
    rest = cache("clear").stdout.splitlines()
    assert len(rest) == 101
    assert rest[-1] == "removed 100 entries, 9.8 KiB"
    assert json.loads(cache("ls", "--json").stdout) == []


def test_clear_by_kind_and_age(filled) -> None:
    assert cache("clear", "--older-than", "7d").stdout == "removed 0 entries, 0 B\n"
    assert cache("clear", "--kind", "links").stdout == "removed 0 entries, 0 B\n"
    wrong = cache("clear", "--kind", "trac")
    assert wrong.returncode == 2
    kinds = "compiled, deployment, hooks, learned, limit, links, measured, profile, runtime, trace"
    assert f"--kind 'trac': there is no such kind of entry; kinds are {kinds}" in wrong.stderr
    removed = json.loads(cache("clear", "--kind", "deployment", "--json").stdout)
    assert [entry["key"] for entry in removed] == [DEPLOYMENT.digest]
    assert len(json.loads(cache("ls", "--json").stdout)) == 100
    assert cache("clear", "--older-than", "0s").stdout.splitlines()[-1] == "removed 100 entries, 9.8 KiB"


def test_clear_with_one_unknown_key_removes_nothing(filled) -> None:
    failed = cache("clear", DEPLOYMENT.digest, "0" * 40)
    assert failed.returncode == 2
    assert "nothing is removed" in failed.stderr
    assert len(json.loads(cache("ls", "--json").stdout)) == 101


def test_stats(filled) -> None:
    with client() as job:
        job.get(PROFILES[0])
        job.get(deployment(65))
    told = json.loads(cache("stats", "--json").stdout)
    assert told["kinds"] == {
        "deployment": {"entries": 1, "bytes": 2048, "hits": 0, "misses": 1},
        "profile": {"entries": 100, "bytes": 10000, "hits": 1, "misses": 0},
    }
    assert told["statistics"]["stored"] == 101
    lines = cache("stats").stdout.splitlines()
    assert "entries    101, 11.8 KiB of 2.0 GiB" in lines
    assert "  profile      100, 9.8 KiB, hits 1, misses 0" in lines
    assert "hits       1 (50 % of 2 look-ups)" in lines


def test_a_kind_that_was_only_looked_up_is_counted(daemon_home) -> None:
    with client() as job:
        job.get(deployment(65))
    assert "  deployment   0, 0 B, hits 0, misses 1" in cache("stats").stdout


def test_stats_zero_tells_what_was_counted_and_begins_anew(filled) -> None:
    with client() as job:
        job.get(PROFILES[0])
    until = cache("stats", "--zero").stdout
    assert "hits       1 (100 % of 1 look-ups)" in until
    assert until.endswith("\nthe counters were reset to 0\n")
    after = json.loads(cache("stats", "--zero", "--json").stdout)
    assert set(after["statistics"].values()) == {0}
    assert after["kinds"]["profile"] == {"entries": 100, "bytes": 10000, "hits": 0, "misses": 0}
    assert "reset to 0" not in cache("stats").stdout


def test_show_of_a_large_deployment_unpacks_it(daemon_home) -> None:
    """It is kept compressed: what is wrong with these bytes is what they are, not that they cannot be unpacked."""
    with client() as job:
        assert job.put(DEPLOYMENT, encode(deploy(chain(10), 2)) + bytes(COMPRESSED))
    told = cache("show", DEPLOYMENT.short)
    assert "The deployment cannot be shown: not a deployment of this version of rannd" in told.stdout
    assert "trailing" in told.stdout


def test_verify_finds_a_flipped_byte(filled) -> None:
    sound = cache("verify")
    assert (sound.returncode, sound.stdout) == (0, "101 entries sound, 0 corrupt\n")
    flip_bytes("deployment")
    broken = cache("verify", "--json")
    assert broken.returncode == 1
    assert json.loads(broken.stdout) == {"sound": 100, "corrupt": [DEPLOYMENT.digest]}
    assert cache("verify").stdout == "100 entries sound, 0 corrupt\n"


def flip_bytes(kind: str) -> None:
    """In the store, in the values of entries of a kind; the daemon is stopped before."""
    subprocess.run([str(BIN / "rannd"), "stop"], check=True, capture_output=True)
    store = sqlite3.connect(places().store)
    store.execute(
        "UPDATE entries SET value = CAST(substr(value, 1, length(value) - 2) || x'0102' AS BLOB) WHERE kind = ?",
        (kind,),
    )
    store.commit()
    store.close()


def test_show_of_a_corrupt_entry_fails_and_says_what_became_of_it(daemon_home) -> None:
    plan = deploy(chain(10), 2, partition_num=2)
    with client() as job:
        assert job.put(DEPLOYMENT, encode(plan))
        assert job.put(measured_key(DEPLOYMENT.digest), b"damaged")
    flip_bytes("measured")
    told = cache("show", DEPLOYMENT.short)
    assert told.returncode == 0
    assert "What its steps took cannot be shown: the measured" in told.stdout
    assert "its stored bytes do not match their checksum" in told.stdout
    flip_bytes("deployment")
    told = cache("show", DEPLOYMENT.short)
    assert (told.returncode, told.stdout) == (DeploymentError.exit_code, "")
    assert told.stderr == (
        f"rannc-cache: the deployment {DEPLOYMENT.short} cannot be shown: its stored bytes do not match their "
        "checksum; the entry was set aside, and the next run that needs it computes it again\n"
    )
    assert cache("show", DEPLOYMENT.short).returncode == 2


def test_a_cache_that_was_lost_is_told_until_the_corrupt_file_is_deleted(filled) -> None:
    subprocess.run([str(BIN / "rannd"), "stop"], check=True, capture_output=True)
    store = Path(places().store)
    store.write_bytes(b"corrupt" * 1000)
    os.utime(store, (0, 0))
    aside = store.with_name(store.name + ".corrupt")
    told = cache("ls")
    assert (told.returncode, told.stdout) == (0, "KIND\tKEY\tAGE\tLAST USED\tSIZE\tWHAT\n")
    assert told.stderr == (
        f"the store was corrupt on {date(aside.stat().st_mtime)} and an empty one was created; the corrupt file is "
        f"{aside} (delete it to end this message)\n"
    )
    assert abs(aside.stat().st_mtime - time.time()) < 3600
    state = subprocess.run([str(BIN / "rannd"), "status"], capture_output=True, text=True, check=True)
    assert state.stderr == cache("stats").stderr == told.stderr
    aside.unlink()
    assert cache("ls").stderr == ""


@pytest.mark.parametrize("words", [("ls",), ("show", DEPLOYMENT.short), ("--help",)])
def test_an_output_that_cannot_be_written_is_one_line(filled, words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        told = subprocess.run(
            [BIN / "rannc-cache", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (told.returncode, told.stderr) == (
        1,
        "rannc-cache: the output cannot be written: No space left on device\n",
    )


def test_it_starts_the_daemon_just_in_time(filled) -> None:
    filled.end_daemons()
    assert len(cache("ls").stdout.splitlines()) == 102
    assert len(filled.pids()) == 1


def test_without_a_daemon_it_says_why(daemon_home) -> None:
    daemon_home.cache.rmdir()
    daemon_home.cache.write_text("in the way")
    failed = cache("ls")
    assert failed.returncode == 6
    assert "cannot be created" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(("name", "group"), [("rannd", rannd), ("rannc-cache", rannc_cache)])
def test_the_page_has_every_command_with_its_options(name: str, group: click.Group) -> None:
    page = (Path(__file__).parents[3] / "docs" / "daemon.md").read_text()
    rows = "\n".join(line for line in page.splitlines() if line.startswith(f"| `{name} "))
    for verb, command in group.commands.items():
        row = "\n".join(line for line in rows.splitlines() if re.match(rf"\| `{name} .*\b{verb}\b", line))
        assert row, verb
        for option in (word for each in command.params for word in each.opts if word.startswith("--")):
            assert option in row, f"{verb} {option}"
