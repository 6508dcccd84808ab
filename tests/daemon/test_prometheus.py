"""`rannd status --prometheus`: valid, complete, and nothing but what is so."""

from __future__ import annotations

import re
from pathlib import Path

from rannd.daemon.common.protocol import KindCount, LeaseInfo, State, Statistics
from rannd.daemon.prometheus import exposition

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
LABELS = r'\{[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"(?:,[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*")*\}'
SAMPLE = re.compile(rf"({NAME})({LABELS})? (-?[0-9.]+(?:e[+-]?[0-9]+)?)")


def parse(text: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Type and samples of each metric. Strict: HELP, TYPE and samples of one metric stand together, in this order."""
    assert text.endswith("\n")
    found: dict[str, tuple[str, dict[str, float]]] = {}
    name, expected = "", "HELP"
    for line in text[:-1].split("\n"):
        if matched := re.fullmatch(rf"# HELP ({NAME}) (\S.*)", line):
            name, expected = matched[1], "TYPE"
            assert name not in found, "each metric once"
        elif matched := re.fullmatch(rf"# TYPE ({NAME}) (gauge|counter)", line):
            assert (matched[1], expected) == (name, "TYPE")
            found[name], expected = (matched[2], {}), "samples"
            assert name.endswith("_total") == (matched[2] == "counter")
        else:
            matched = SAMPLE.fullmatch(line)
            assert matched, line
            assert (matched[1], expected) == (name, "samples")
            assert (matched[2] or "") not in found[name][1], "each sample once"
            found[name][1][matched[2] or ""] = float(matched[3])
    return found


STATE = State(
    version='0.1"\\\n',
    protocol=2,
    pid=1,
    uptime_s=12.5,
    idle_s=0,
    requests=7,
    rejected=1,
    entries=3,
    bytes=1 << 40,
    max_bytes=1 << 41,
    socket="",
    store="",
    log="",
    leases=[LeaseInfo("0" * 40, 1, 1.0, 2), LeaseInfo("1" * 40, 1, 1.0, 3)],
    statistics=Statistics(hits=5, misses=6, stored=10, evicted=11, removed=12, discarded=13, corrupt=14, waited=15),
    kinds={"trace": KindCount(1, 2), "deployment": KindCount(4, 4)},
    clients=2,
)


def test_all_metrics() -> None:
    told = {name: samples for name, (_, samples) in parse(exposition(STATE)).items()}
    assert told == {
        "rannd_up": {"": 1},
        "rannd_build_info": {r'{version="0.1\"\\\n",protocol="2"}': 1},
        "rannd_uptime_seconds": {"": 12.5},
        "rannd_clients": {"": 2},
        "rannd_entries": {"": 3},
        "rannd_bytes": {"": 2**40},
        "rannd_max_bytes": {"": 2**41},
        "rannd_leases": {"": 2},
        "rannd_lease_waiters": {"": 5},
        "rannd_requests_total": {"": 7},
        "rannd_rejected_total": {"": 1},
        "rannd_hits_total": {'{kind="deployment"}': 4, '{kind="trace"}': 1},
        "rannd_misses_total": {'{kind="deployment"}': 4, '{kind="trace"}': 2},
        "rannd_stored_total": {"": 10},
        "rannd_evicted_total": {"": 11},
        "rannd_removed_total": {"": 12},
        "rannd_discarded_total": {"": 13},
        "rannd_corrupt_total": {"": 14},
        "rannd_waited_total": {"": 15},
    }


def test_no_count_of_the_store_is_forgotten() -> None:
    told = parse(exposition(STATE))
    assert all(f"rannd_{name}_total" in told for name in Statistics.__struct_fields__)


def test_the_page_names_all_metrics() -> None:
    page = (Path(__file__).parents[2] / "docs" / "daemon.md").read_text()
    assert set(re.findall(r"`(rannd_[a-z_]+)(?:\{[a-z,]+\})?`", page)) == set(parse(exposition(STATE)))


def test_without_a_daemon() -> None:
    assert exposition(None) == "# HELP rannd_up Whether the daemon runs.\n# TYPE rannd_up gauge\nrannd_up 0\n"
