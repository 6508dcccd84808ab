"""Folders of compiled code: complete or not there, and closed to others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rannd.daemon.common.paths import places
from rannd.errors import DaemonError
from rannd.runtime.compiling.kept_code import KeptCode

CPU = torch.device("cpu")


@pytest.fixture
def kept() -> KeptCode:
    return KeptCode(CPU, "on")


def where() -> Path:
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def write(kept: KeptCode, text: str) -> None:
    with kept.opened_key(kept.make_key("a block", 1)):
        (where() / "code").write_text(text)


def folder(kept: KeptCode) -> Path:
    return Path(places().compiled) / kept.make_key("a block", 1).digest


def test_torch_writes_beside_and_the_folder_appears_as_a_whole(kept: KeptCode) -> None:
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it when it first compiles
    with kept.opened_key(kept.make_key("a block", 1)):
        (where() / "code").write_text("half")
        assert not folder(kept).exists()
    assert (folder(kept) / "code").read_text() == "half"
    assert folder(kept).stat().st_mode & 0o777 == 0o700
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before


def test_what_fails_leaves_nothing(kept: KeptCode) -> None:
    def interrupted() -> None:
        with kept.opened_key(kept.make_key("a block", 1)):
            (where() / "code").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(places().compiled) == []


def test_a_folder_is_never_changed(kept: KeptCode) -> None:
    write(kept, "one")
    before = folder(kept).stat().st_ino
    with kept.opened_key(kept.make_key("a block", 1)):
        assert (where() / "code").read_text() == "one"
    assert folder(kept).stat().st_ino == before, "nothing was lacking"


def test_readonly_and_refresh(kept: KeptCode) -> None:
    write(kept, "one")
    write(KeptCode(CPU, "readonly"), "two, which is longer")
    assert (folder(kept) / "code").read_text() == "one"
    with KeptCode(CPU, "refresh").opened_key(kept.make_key("a block", 1)):
        assert not os.listdir(where())
        (where() / "code").write_text("three")
    assert (folder(kept) / "code").read_text() == "three"


def test_off_keeps_nothing(kept: KeptCode) -> None:
    off = KeptCode(CPU, "off")
    write(off, "one")
    assert off.root is None
    assert not folder(kept).exists()


def test_a_folder_of_the_user_s_is_used_as_it_is(
    kept: KeptCode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    write(KeptCode(CPU, "on"), "one")
    assert (tmp_path / "code").read_text() == "one"


def test_others_must_not_be_able_to_enter(kept: KeptCode) -> None:
    assert kept.root is not None
    kept.root.chmod(0o750)
    with pytest.raises(DaemonError, match="mode 0750"):
        places().secure_compiled()
    assert KeptCode(CPU, "on").root is None
    kept.root.chmod(0o700)
    kept.root.rename(kept.root.with_name("elsewhere"))
    kept.root.symlink_to(kept.root.with_name("elsewhere"))
    with pytest.raises(DaemonError, match="symbolic link"):
        places().secure_compiled()


def test_the_key_has_everything_that_code_depends_on(kept: KeptCode, monkeypatch: pytest.MonkeyPatch) -> None:
    first = kept.make_key("a block", 1)
    assert first.digest != kept.make_key("another", 1).digest
    assert first.digest != kept.make_key("a block", 2).digest
    monkeypatch.setenv("CXX", "/bin/true")
    assert first.digest != KeptCode(CPU, "on").make_key("a block", 1).digest
    assert {"version.torch", "version.triton", "version.c++", "flag.fp32 matmul"} <= first.components.keys()
    matmul: Any = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"  # torch's older getters raise from now on
        assert first.digest != kept.make_key("a block", 1).digest
    finally:
        matmul.fp32_precision = before


def test_a_folder_that_goes_while_it_is_copied_is_made_again(kept: KeptCode, monkeypatch: pytest.MonkeyPatch) -> None:
    write(kept, "one")

    def lacking(source: Path, target: Path) -> None:
        raise shutil.Error([(str(source), str(target), "No such file or directory")])

    monkeypatch.setattr(shutil, "copytree", lacking)
    with kept.opened_key(kept.make_key("a block", 1)):
        assert not (where() / "code").exists()
        (where() / "code").write_text("two")
    assert (folder(kept) / "code").read_text() == "two"


@pytest.mark.parametrize("damage", ["cut off", "removed", "changed"])
def test_a_damaged_folder_is_made_again(kept: KeptCode, damage: str) -> None:
    """After a power cut, say; torch would fail with it in every run."""
    write(kept, "one")
    code = folder(kept) / "code"
    if damage == "removed":
        code.unlink()
    else:
        code.write_text("" if damage == "cut off" else "ONE")
    with kept.opened_key(kept.make_key("a block", 1)):
        assert not os.listdir(where())
        (where() / "code").write_text("two")
    assert code.read_text() == "two"
    with kept.opened_key(kept.make_key("a block", 1)):
        assert (where() / "code").read_text() == "two"
