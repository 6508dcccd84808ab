"""Links of README and docs: each leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
NAVIGATION = re.findall(r"^ +- .*: ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


@cache
def _text(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _prose(page: Path) -> str:
    """Without `code` in lines, too."""
    return re.sub(r"`[^`]*`", "``", _text(page))


def anchor(heading: str) -> str:
    """The anchor of a heading, on GitHub and on the site (.ci/site.py, mkdocs.yml)."""
    return re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")


@cache
def _anchors(page: Path) -> list[str]:
    return [anchor(heading) for heading in re.findall(r"^#{1,6} (.*)$", _text(page), re.MULTILINE)]


def _wrong_links(page: Path) -> list[str]:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)):
        if "://" in link:
            continue
        path, _, heading = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.is_file():
            wrong.append(f"{link}: no such file")
        elif heading and _anchors(file).count(heading) != 1:
            wrong.append(f"{link}: {_anchors(file).count(heading)} such headings")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert _wrong_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_linked_when_they_are_named(page: Path) -> None:
    """``docs/launching.md`` in the text of a page would lead nowhere; the text of a link may say so."""
    unlinked = re.sub(r"\[[^\]]*\]\([^)]*\)", "", _prose(page))
    assert re.findall(r"docs/[\w-]+\.md", unlinked) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lists_are_lists_on_the_site(page: Path) -> None:
    """Python-Markdown, unlike GitHub, takes a list or table right after a line of text as a part of that text."""
    lines = _text(page).splitlines()
    item, row = re.compile(r"[-*] |\d+\. "), re.compile(r"\|")
    wrong = [
        line
        for before, line in itertools.pairwise(lines)
        if before.strip()
        and not before.startswith(" ")
        and any(kind.match(line) and not kind.match(before) for kind in (item, row))
    ]
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    pages = {page.name for page in PAGES} - {"README.md"} | {"index.md"}
    assert sorted(NAVIGATION) == sorted(pages)


@pytest.mark.parametrize(
    ("heading", "expected"),
    [("Is a step right?", "is-a-step-right"), ("`rannc-run` and MPI", "rannc-run-and-mpi"), ("1F1B: A, B", "1f1b-a-b")],
)
def test_anchors(heading: str, expected: str) -> None:
    assert anchor(heading) == expected


def test_a_wrong_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A b\n[x](#a-b) [y](#c) [z](other.md) [w](https://elsewhere.org)\n```text\n[v](none)\n```\n")
    assert [wrong.split(":")[0] for wrong in _wrong_links(page)] == ["#c", "other.md"]
