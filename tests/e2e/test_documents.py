"""Every command in README and docs runs: the lines of their ``sh`` blocks, one after the other, as a newcomer would."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from job import ROOT, Job
from stand_ins import install, install_forking

PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if "```sh\n" in page.read_text()]

FEW = ("README.md",)
"""That of `make test`; `make test-long` reads the others."""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "page",
    [page if page.name in FEW else pytest.param(page, marks=pytest.mark.long) for page in PAGES],
    ids=lambda page: page.name,
)
def test_commands_run(job: Job, page: Path, tmp_path: Path) -> None:
    """In a folder with the examples, and with the tutorial as ``train.py``; srun, docker and the like are stand-ins.

    Ranks are forks; test_main_job.py starts the first commands of README as a newcomer does.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    tutorial = (ROOT / "examples" / "tutorial.py").read_text()
    (tmp_path / "train.py").write_text(
        tutorial.replace("if len(sys.argv) != 4:", "sys.argv[1:] = ['4', '8', '4']\nif False:")
    )
    tools = install(tmp_path / "tools")
    path = f"{tools}:{job.environment['PATH']}"
    install_forking(tools, "rannc-run", "python")
    for block in blocks(page):
        job.run("bash", "-euo", "pipefail", "-c", block, folder=tmp_path, PATH=path)


def test_no_command_hides_in_an_untagged_block() -> None:
    """Blocks are ``sh`` (run above), ``python``, ``text`` or ``toml``: another one would not be looked at."""
    wrong = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        tags = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
        wrong += [f"{page.name}: {tag!r}" for tag in tags if tag not in ("sh", "python", "text", "toml")]
    assert not wrong


@pytest.mark.full  # its commands are README's
def test_demo_of_the_makefile(job: Job) -> None:
    assert "took the plan from the cache" in job.run("bash", ".ci/demo", VENV=sys.prefix)


def test_pages_that_readme_names_exist() -> None:
    for page in re.findall(r"docs/[\w-]+\.md", (ROOT / "README.md").read_text()):
        assert (ROOT / page).is_file(), page
