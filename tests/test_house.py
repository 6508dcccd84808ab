"""The layout of the code: folders that read as a table of contents, one name for one thing, no circle of imports."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rannd", "pyrannc")
FILES = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
MODULES = [file for file in FILES if file.name != "__init__.py"]
FOLDERS = sorted({file.parent for file in MODULES})
FEWEST, MOST = 4, 12

SAME_FILE_NAME: dict[str, str] = {}
SAME_CLASS_NAME: dict[str, str] = {}


def _relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


@pytest.mark.parametrize("folder", FOLDERS, ids=_relative)
def test_a_folder_has_few_files_and_says_what_it_is_for(folder: Path) -> None:
    name = _relative(folder)
    count = sum(file.parent == folder for file in MODULES)
    fewest = 1 if name == "pyrannc/integrations" else FEWEST  # a framework each
    assert fewest <= count <= MOST, f"{name} has {count} files"
    first = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert first, f"{name}/__init__.py has no docstring"


@pytest.mark.parametrize("file", MODULES, ids=_relative)
def test_a_file_says_what_it_is_for(file: Path) -> None:
    assert ast.get_docstring(ast.parse(file.read_text()))


def test_a_file_name_is_used_once() -> None:
    found = defaultdict(list)
    for file in MODULES:
        found[file.stem].append(_relative(file))
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in SAME_FILE_NAME} == {}


def test_a_public_class_name_is_used_once() -> None:
    found = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(_relative(file))
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in SAME_CLASS_NAME} == {}


def test_a_name_of_a_test_file_is_used_once() -> None:
    """pytest imports test files by their base names: of two of one name it collects neither with the other."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []


OF_OTHERS = {"train.py", "large.py", "looked/small.py", "back.py", "version.py", "__main__.py"}
OF_OTHERS |= {"zero_to_fp32.py", "ds_to_universal.py"}
"""Scripts that pages have users write; files of torch, Python and DeepSpeed."""
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMED = re.compile(r"[\w./]*\w\.py\b")


def _known_tails() -> set[str]:
    """Names of the files of the repository, from any of their folders on: `rules/parts.py`, `parts.py`."""
    tails = set(OF_OTHERS)
    for folder in ("rannd", "pyrannc", "tests", "bench", "examples", ".ci"):
        for file in (ROOT / folder).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            tails |= {"/".join(parts[start:]) for start in range(len(parts))}
    return tails


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_are_there(page: Path) -> None:
    named = {name.removeprefix("../") for name in NAMED.findall(page.read_text())}
    assert sorted(named - _known_tails()) == []


def test_code_names_files_that_are_there() -> None:
    known = _known_tails()
    wrong = [(_relative(file), name) for file in FILES for name in NAMED.findall(file.read_text()) if name not in known]
    assert wrong == []


def _circle(imports: dict[str, set[str]]) -> list[str]:
    """Names that import each other in a circle; none: []."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as exc:
        return [str(each) for each in exc.args[1]]
    return []


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Module -> the modules it imports, anywhere in its text: at the top, in functions, under TYPE_CHECKING."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {name: set(graph.find_modules_directly_imported_by(name)) - {name} for name in graph.modules}


def test_no_circle_of_files(imports: dict[str, set[str]]) -> None:
    assert len(imports) > 250
    assert _circle(imports) == []


def test_no_circle_of_folders(imports: dict[str, set[str]]) -> None:
    folders = {name.rpartition(".")[0] for name in imports}

    def folder(module: str) -> str:
        return module if module in folders else module.rpartition(".")[0]

    arrows = defaultdict(set)
    for name, others in imports.items():
        arrows[folder(name)] |= {folder(other) for other in others} - {folder(name)}
    assert _circle(dict(arrows)) == []


def test_a_circle_is_found() -> None:
    assert _circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert not _circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
