"""The manifest of a checkpoint: whole for versions of rannd with a field more or less, and no value changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rannd.errors import CheckpointError
from rannd.runtime.checkpoint import manifest
from rannd.runtime.checkpoint.manifest import MANIFEST, Manifest
from rannd.runtime.storage.checkpoint_file import FileFacts

STORED = Path(__file__).parent / "stored"


class LaterFacts(FileFacts, frozen=True):
    """Facts of a file as a later version may have them."""

    kind: str = "tensors"


class LaterManifest(Manifest, frozen=True):
    """A manifest as a later version may have it."""

    files: dict[str, LaterFacts] = msgspec.field(default_factory=dict)  # type: ignore[assignment]
    host: str = "here"


def earlier() -> Manifest:
    return Manifest(1, "model.", 2, None, "2.15.0", {"b": FileFacts(3, 4), "a": FileFacts(1, 2)})


def later(host: str = "here") -> Manifest:
    return LaterManifest(1, "model.", 2, 7, "2.15.0", {"a": LaterFacts(1, 2, "text")}, host=host)


def test_it_has_the_bytes_that_earlier_versions_wrote() -> None:
    found = Manifest.read(STORED)
    assert found is not None
    assert found.sealed() == (STORED / MANIFEST).read_bytes()


@pytest.mark.parametrize("written", [earlier().sealed(), (STORED / MANIFEST).read_bytes()], ids=["now", "stored"])
def test_a_version_with_more_fields_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(written)
    monkeypatch.setattr(manifest, "Manifest", LaterManifest)
    found = Manifest.read(tmp_path)
    assert isinstance(found, LaterManifest)
    assert found.host == "here"
    assert {facts.kind for facts in found.files.values()} == {"tensors"}


def test_a_field_that_nobody_knows_may_not_be_deep(tmp_path: Path) -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / MANIFEST).write_bytes(earlier().sealed().replace(b"{", b'{"more": ' + deep + b",", 1))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json is damaged: "):
        Manifest.read(tmp_path)


def test_a_version_with_fewer_fields_reads_it(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(later("there").sealed())
    found = Manifest.read(tmp_path)
    assert type(found) is Manifest
    assert (found.step, found.files) == (7, {"a": FileFacts(1, 2)})


@pytest.mark.parametrize("name", ["", ".", "..", "../b", "a/b", "/b", "a\0"])
def test_it_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    (tmp_path / MANIFEST).write_bytes(Manifest(1, "", 1, None, "2.15.0", {name: FileFacts(1, 2)}).sealed())
    with pytest.raises(CheckpointError, match=r"damaged: it names the file"):
        Manifest.read(tmp_path)


def _places(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, dict):
        return [place for key, each in value.items() for place in _places(each, (*path, key))]
    return [path]


PLACES = {
    f"{made.__name__} {'.'.join(place)}": (made, place)
    for made in (earlier, later)
    for place in _places(json.loads(made().sealed()))
}


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("gone", [False, True], ids=["other", "gone"])
def test_every_value_counts(tmp_path: Path, name: str, gone: bool) -> None:
    """Those that this version does not know as well."""
    made, place = PLACES[name]
    said = json.loads(made().sealed())
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    assert Manifest.read(tmp_path) is not None
    inside = said
    for key in place[:-1]:
        inside = inside[key]
    value = inside[place[-1]]
    inside[place[-1]] = f"{value}x" if isinstance(value, str) else 0 if value is None else value - 1
    if gone:
        del inside[place[-1]]
    (tmp_path / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.read(tmp_path)
