"""Why something was missed: the nearest entry, and in what it differs."""

from __future__ import annotations

from pathlib import Path

from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common import keys
from rannd.daemon.common.near_misses import clause, differences, nearest, phrase
from rannd.daemon.common.protocol import Difference, EntryInfo, Missed, Misses, NewEntry
from rannd.daemon.store.store import KEEP_MISSES, Store


def info(components: dict[str, str]) -> EntryInfo:
    return EntryInfo("0" * 40, "trace", 2, "1", 0.0, 0.0, 0, 1, "", components)


def test_differences_are_told_by_name() -> None:
    found = differences({"a": "1", "b": "2", "new": "3"}, {"a": "1", "b": "4", "old": "5"})
    assert found == [Difference("b", "2", "4"), Difference("new", "3", None), Difference("old", None, "5")]


def test_the_entry_with_fewest_differences_is_nearest_the_first_of_equals() -> None:
    wanted = {"a": "1", "b": "2", "c": "3"}
    far, near, same = (info({"a": a, "b": b, "c": "3"}) for a, b in (("0", "0"), ("1", "0"), ("0", "2")))
    assert nearest(wanted, [far, near, same]) == (near, [Difference("b", "2", "0")])
    assert nearest(wanted, []) == (None, [])


def test_an_entry_of_the_same_model_is_nearer_than_any_other() -> None:
    wanted = {"graph": "g", "b": "2", "c": "3"}
    other = info({"graph": "other", "b": "2", "c": "3"})
    same = info({"graph": "g", "b": "0", "c": "0"})
    assert nearest(wanted, [other, same])[0] is same


def test_a_clause_says_what_has_changed() -> None:
    assert clause([Difference("global_batch", "64", "128"), Difference("inputs", "[64]", "[128]")]) == "batch 128 -> 64"
    assert clause([Difference("a", "1", "0"), Difference("world_size", "4", "2")]) == "ranks 2 -> 4, a 0 -> 1"
    memory = Difference("device_memory", str(2 * 2**30), str(11374228684))
    assert clause([memory]) == "device memory 10.59 GiB -> 2 GiB"
    assert clause([Difference("code", f'"{"a" * 40}"', f'"{"b" * 40}"')]) == "code changed"
    assert clause([Difference("plan.mem_margin", "0.2", None)]) == "mem_margin changed"
    assert clause([Difference(name, "1", "0") for name in "abcd"]) == "a 0 -> 1, b 0 -> 1 and 2 more"
    assert clause([Difference("graph", "g", "other"), Difference("a", "1", "0")]) == ""


def test_a_phrase_shows_where_long_texts_differ() -> None:
    assert phrase(Difference("global_batch", "64", "128")) == "global_batch 64, there 128"
    assert phrase(Difference("x", None, "1")) == "x (nothing), there 1"
    long = phrase(Difference("topology", "[0,0]," * 50 + "[1,7]", "[0,0]," * 50 + "[2,7]"))
    assert "[1,7]" in long
    assert "[2,7]" in long
    assert len(long) < 120


def client() -> Client:
    return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)


def job(batch: int, margin: float = 0.1) -> keys.Key:
    return keys.make_key("deployment", {"graph": "cafe" * 16, "global_batch": batch, "plan.mem_margin": margin})


def test_a_client_is_told_why_it_missed(daemon_home) -> None:
    with client() as cache:
        assert cache.why(job(64)) == ("", "the cache has no other deployment")
        cache.put_many([(job(32, 0.2), b"far"), (job(128), b"near")])
        told = cache.why(job(64))
        assert told == (
            "batch 128 -> 64",
            f"the nearest deployment in the cache, {job(128).short}, differs in global_batch 64, there 128",
        )
        other = keys.make_key("deployment", {"graph": "f00d" * 16, "global_batch": 128, "plan.mem_margin": 0.1})
        assert cache.why(other)[0] == "", "another model's entry explains nothing"
        assert cache.why(keys.make_key("trace", {"x": 1})) == ("", "the cache has no other trace"), "kinds are apart"


def test_misses_are_remembered_through_a_restart(daemon_home) -> None:
    with client() as cache:
        cache.put(job(128), b"x")
        for batch in range(KEEP_MISSES + 5):
            cache.why(job(batch))
    daemon_home.end_daemons()
    with client() as cache:
        assert cache._session is not None
        misses = cache._session.ask(Misses(), Missed).misses
    assert len(misses) == KEEP_MISSES
    assert misses[0].key == job(KEEP_MISSES + 4).digest
    assert misses[0].nearest == job(128).digest
    assert misses[0].differences == [Difference("global_batch", str(KEEP_MISSES + 4), "128")]


def test_readonly_asks_and_leaves_nothing(daemon_home) -> None:
    with client() as cache:
        cache.put(job(128), b"x")
        readonly = connect(mode="readonly", timeout_s=60, idle_s=600, max_bytes=1 << 30)
        assert "differs in global_batch 64, there 128" in readonly.why(job(64))[1]
        assert cache._session is not None
        assert cache._session.misses() == []


def test_an_entry_is_not_nearest_to_itself(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "s.sqlite"), max_bytes=1 << 20)
    key = job(1)
    store.put([NewEntry(key.digest, key.kind, key.components, b"x")], "1")
    assert store.nearest("deployment", key.components).entry is None
    store.close()
