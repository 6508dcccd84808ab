"""Which distribution a package belongs to."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from rannd.graph.fingerprint import provenance


def _names(top: str) -> list[str]:
    return sorted({str(each.metadata["Name"]) for each in provenance.providers().get(top, [])})


def test_packages_have_the_distributions_that_python_finds() -> None:
    found = metadata.packages_distributions()
    assert {"torch", "numpy", "yaml", "msgspec"} <= found.keys()
    for top, names in found.items():
        assert _names(top) == sorted(set(names)), top


def test_all_forms_of_a_list_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def install(name: str, folder: str, **files: str) -> None:
        (tmp_path / folder).mkdir()
        for file, text in files.items():
            (tmp_path / folder / file.replace("_txt", ".txt").replace("_INFO", "-INFO")).write_text(text)

    about = "Metadata-Version: 2.1\nName: {}\nVersion: 1\n"
    record = 'one/__init__.py,sha256=x,3\n"two/a,b.py",,\nthree.py,,\nfour.cpython-311-x86_64-linux-gnu.so,,\n'
    other = "first-1.dist-info/METADATA,,\n../../bin/five,,\nnot_code.txt,,\n"
    install("first", "first-1.dist-info", METADATA=about.format("first"), RECORD=record + other)
    install("second", "second-1.dist-info", METADATA=about.format("second"), RECORD=record, top_level_txt="six\none\n")
    install("third", "third-1.egg-info", PKG_INFO=about.format("third"), SOURCES_txt="setup.py\nseven/__init__.py\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    provenance.providers.cache_clear()
    try:
        assert _names("one") == ["first", "second"]
        assert [_names(top) for top in ("two", "three", "four")] == [["first"]] * 3
        assert _names("six") == ["second"]
        assert _names("seven") == ["third"]
        assert not any(map(_names, ("five", "not_code", "first-1", "..")))
    finally:
        provenance.providers.cache_clear()
