"""`rannc-cache why`: what differs, and why the last run planned again."""

from __future__ import annotations

import json
import os
import time

import pytest
from cache_command import PROFILES, cache, client, deployment, on_terminal

from rannd.daemon.common import keys
from rannd.daemon.common.protocol import Miss
from rannd.runner.cache.why import RUN_S, latest

LONG = keys.make_key("trace", {"module": "m" * 300, "steps": 1})
OTHER = keys.make_key("trace", {"module": "m" * 299 + "n", "mode": "train"})


@pytest.fixture
def filled(daemon_home) -> object:
    with client() as job:
        assert job.put_many([(key, b"x") for key in (deployment(64), deployment(128), PROFILES[0], LONG, OTHER)]) == 5
    return daemon_home


def test_only_the_components_that_differ_are_shown(filled) -> None:
    told = cache("why", deployment(64).short, deployment(128).short)
    assert told.returncode == 0
    assert told.stdout == "component\tfirst\tsecond\nglobal_batch\t64\t128\n"


def test_texts_are_shown_at_full_length(filled) -> None:
    lines = cache("why", LONG.digest, OTHER.digest).stdout.splitlines()
    assert lines == [
        "component\tfirst\tsecond",
        'mode\t(nothing)\t"train"',
        f'module\t"{"m" * 300}"\t"{"m" * 299}n"',
        "steps\t1\t(nothing)",
    ]
    terminal = on_terminal("why", LONG.digest, OTHER.digest)
    assert max(map(len, terminal.splitlines())) <= 80
    assert terminal.count("m") >= 599, "folded, nothing is left out"


def test_differences_for_programs(filled) -> None:
    told = json.loads(cache("why", deployment(64).short, deployment(128).short, "--json").stdout)
    assert told == {
        "first": {"key": deployment(64).digest, "kind": "deployment"},
        "second": {"key": deployment(128).digest, "kind": "deployment"},
        "differences": [{"name": "global_batch", "first": "64", "second": "128"}],
    }


def test_other_kinds_and_one_entry_twice(filled) -> None:
    kinds = cache("why", deployment(64).short, PROFILES[0].short)
    assert kinds.stdout == (
        f"the kinds differ: {deployment(64).short} is a deployment, {PROFILES[0].short} a profile\n"
    )  # fmt: skip
    same = cache("why", PROFILES[0].short, PROFILES[0].digest)
    assert (same.returncode, same.stdout) == (
        0,
        f"{PROFILES[0].short} and {PROFILES[0].digest} are the same entry, profile {PROFILES[0].digest}\n",
    )
    assert json.loads(cache("why", PROFILES[0].short, PROFILES[0].digest, "--json").stdout)["differences"] == []


def test_the_last_miss(filled) -> None:
    with client() as job:
        job.why(deployment(32))
        job.why(deployment(96))
    told = cache("why", "--last").stdout.splitlines()
    assert told[0].startswith(f"deployment {deployment(96).short} was missed at 20")
    assert told[0].endswith(" s ago")
    assert told[1].endswith("; what differs:")
    assert told[2] == "component\twanted\tthere"
    assert told[3] in ("global_batch\t96\t64", "global_batch\t96\t128")
    assert len(told) == 4, "only the newest"
    (miss,) = json.loads(cache("why", "--last", "--json").stdout)
    assert (miss["kind"], miss["key"]) == ("deployment", deployment(96).digest)
    assert miss["components"] == deployment(96).components
    assert [each["name"] for each in miss["differences"]] == ["global_batch"]


def test_the_last_miss_of_each_kind_of_the_last_run(filled) -> None:
    missed = keys.make_key("trace", {"module": "x"})
    with client() as job:
        job.why(missed)
        job.why(deployment(96))
    first, second = cache("why", "--last").stdout.split("\n\n")
    assert first.startswith(f"deployment {deployment(96).short} ")
    assert second.startswith(f"trace {missed.short} ")
    (miss,) = json.loads(cache("why", "--last", "--kind", "trace", "--json").stdout)
    assert miss["key"] == missed.digest
    only = cache("why", "--last", "--kind", "trace").stdout
    assert only.splitlines()[1:] == second.splitlines()[1:]


def test_a_miss_in_an_empty_cache(daemon_home) -> None:
    with client() as job:
        job.why(deployment(96))
    told = cache("why", "--last").stdout.splitlines()
    assert told[1:] == ["the cache had no other deployment then"]


def test_no_miss(filled) -> None:
    told = cache("why", "--last")
    assert told.returncode == 0
    assert told.stdout.startswith("no miss is recorded: ")
    assert cache("why", "--last", "--kind", "trace").stdout.startswith("no miss of kind trace is recorded: ")
    assert json.loads(cache("why", "--last", "--json").stdout) == []


def test_misses_of_a_run_before_are_left_out() -> None:
    now = time.time()
    new, same, before, old = (
        Miss(now - ago, kind, "0" * 40, {}, "", [])
        for ago, kind in ((0, "deployment"), (60, "trace"), (120, "trace"), (RUN_S + 1, "limit"))
    )
    assert latest([new, same, before, old]) == [new, same]
    assert latest([new, same, before, old], "limit") == [old]
    assert latest([]) == []


def test_misses_of_an_earlier_run_are_not_of_the_last() -> None:
    """Which may have found its trace, and missed only its deployment."""
    now = time.time()
    first = Miss(now, "deployment", "0" * 40, {}, "", [], 1)
    earlier = Miss(now - 1, "trace", "0" * 40, {}, "", [], 2)
    assert latest([first, earlier]) == [first]
    assert latest([first, earlier], "trace") == [earlier]


def test_a_miss_tells_whose_it_was(filled) -> None:
    with client() as job:
        job.why(deployment(32))
    assert json.loads(cache("why", "--last", "--json").stdout)[0]["pid"] == os.getpid()


@pytest.mark.parametrize(
    "words", [(), ("aaaa",), ("aaaa", "bbbb", "cccc"), ("--last", "aaaa"), ("aaaa", "bbbb", "--kind", "trace")]
)
def test_wrong_use(daemon_home, words: tuple[str, ...]) -> None:
    told = cache("why", *words)
    assert (told.returncode, told.stdout) == (2, "")
    assert "rannc-cache why KEY KEY" in told.stderr


def test_keys_and_kinds_that_cannot_be(filled) -> None:
    assert "starts with 0000" in cache("why", "0" * 40, deployment(64).short).stderr
    told = cache("why", "--last", "--kind", "No").stderr
    assert "--kind 'No': there is no such kind of entry; kinds are compiled, deployment" in told
