"""The digests of rannd's sources in keys: every file that decides a trace or a plan is in them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from rannd import sources
from rannd.sources import CHECKING, HOME, PLANNING, TRACING, digest_of, files_of

BESIDE = {
    "rannd": "the version, which is a component of every key",
    "rannd.config": "the values of items, which are components; clusters are for dry runs, which are not cached",
    "rannd.daemon": "makes keys, and hands bytes on",
    "rannd.errors": "messages",
    "rannd.log": "messages",
    "rannd.plain_file": "reads and writes the files that a user names; a profile's digest is a component",
    "rannd.runtime.comm": "hands bytes on; device, memory and ranks are components",
    "rannd.runtime.failure": "what is written where a job fails",
    "rannd.sources": "makes the digests; one of more files is another one",
}
"""Modules, with those below, that the digested ones import and that are not digested, and why: they decide nothing."""

BESIDE_CHECKING = {
    "rannd.runtime.parameters.ownership": "which stages hold a parameter, which the plan decides",
    "rannd.runtime.planning": "how much memory is free",
    "rannd.units": "messages",
}
BESIDE_PLANNING = {
    "rannd.ranks.core_share": "where the process that plans runs",
    "rannd.ranks.rank_notes": "whether anybody may need plans for other hosts",
    "rannd.runtime.optim.coupling": "whether the optimizer allows ZeRO, which is in the key",
    "rannd.runtime.binding.planned_cut": "whether a plan is one for this graph, also for plans from the cache",
    "rannd.units": "messages",
}

DIGESTS = {
    "trace": (TRACING, BESIDE),
    "checking": ((*TRACING, *CHECKING), BESIDE | BESIDE_CHECKING),
    "plan": (PLANNING, BESIDE | BESIDE_PLANNING),
}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> the modules it imports, anywhere in its text."""
    graph = grimp.build_graph("rannd", cache_dir=None)
    return {name: set(graph.find_modules_directly_imported_by(name)) for name in graph.modules}


@pytest.fixture
def unread() -> Iterator[None]:
    """Digests are made anew, before and after."""
    digest_of.cache_clear()
    yield
    digest_of.cache_clear()


def _module(file: Path) -> str:
    parts = ("rannd", *file.relative_to(HOME).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _beside(module: str, beside: dict[str, str]) -> str:
    """The line of the table that has the module; empty: none."""
    if module == "rannd":
        return module
    return next((name for name in beside if name != "rannd" and f"{module}.".startswith(f"{name}.")), "")


@pytest.mark.parametrize("name", DIGESTS)
def test_every_module_that_decides_is_digested(imports: dict[str, set[str]], name: str) -> None:
    """A trace or a plan of other code would be used without a word, were one of them left out."""
    places, beside = DIGESTS[name]
    digested = {_module(file) for file in files_of(places)}
    assert digested <= imports.keys()
    imported = {other for module in digested for other in imports[module]} - digested
    assert sorted(module for module in imported if not _beside(module, beside)) == []


def test_every_reason_is_one_for_something(imports: dict[str, set[str]]) -> None:
    used = set()
    for places, beside in DIGESTS.values():
        digested = {_module(file) for file in files_of(places)}
        used |= {_beside(other, beside) for module in digested for other in imports[module] - digested}
    assert used == {*BESIDE, *BESIDE_CHECKING, *BESIDE_PLANNING}


def test_every_module_that_makes_keys_is_digested(imports: dict[str, set[str]]) -> None:
    digested = {_module(file) for file in files_of((*PLANNING, *CHECKING))}
    makers = {name for name, others in imports.items() if "rannd.daemon.common.keys" in others}
    ranks = {name for name in makers if not name.startswith(("rannd.daemon.", "rannd.runner."))}
    # One only hands them on, the other's key has that of a plan in it.
    assert sorted(ranks - digested) == ["rannd.runtime.comm.cache_client", "rannd.runtime.deployment.step_measuring"]


EDITED = {
    TRACING: ("graph/model.py", "graph/rows/rules/products.py", "patches.py", "torch_mends.py"),
    CHECKING: ("runtime/traces/trace_checking.py",),
    PLANNING: ("graph/model.py", "torch_mends.py", "profile/measure.py", "runtime/planning/plan_provider.py"),
}


@pytest.mark.usefixtures("unread")
def test_an_edited_file_is_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = {places: digest_of(places) for places in EDITED}
    assert len(set(real.values())) == len(EDITED)
    copied = tmp_path / "rannd"
    shutil.copytree(HOME, copied, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "HOME", copied)
    for places, files in EDITED.items():
        digest_of.cache_clear()
        assert digest_of(places) == real[places]  # wherever the package is
        seen = {real[places]}
        for file in files:
            with (copied / file).open("a") as opened:
                opened.write("\n")
            assert digest_of(places) in seen  # what is loaded stays as it is
            digest_of.cache_clear()
            assert digest_of(places) not in seen
            seen.add(digest_of(places))
        for file in files:
            shutil.copy(HOME / file, copied / file)


@pytest.mark.usefixtures("unread")
def test_a_file_that_moved_is_another_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "HOME", tmp_path)
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "a.py").write_text("x = 1\n")
    before = digest_of(("graph",))
    (tmp_path / "graph" / "a.py").rename(tmp_path / "graph" / "b.py")
    digest_of.cache_clear()
    assert digest_of(("graph",)) != before


@pytest.mark.parametrize("place", ["grahp", "patches", "conf"])
def test_a_place_without_files_is_an_error(place: str) -> None:
    """The digest of nothing would never change."""
    with pytest.raises(FileNotFoundError, match=place):
        files_of((place,))
