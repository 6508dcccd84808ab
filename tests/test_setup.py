"""`make setup` where an environment with a torch is active."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import torch, rannd; print(torch.__version__, torch.__file__)"


@pytest.mark.long
def test_the_torch_of_an_active_environment_is_used(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        [ROOT / ".ci" / "setup"],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path), "VENV": str(venv)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"has torch {version('torch')}: using it" in done.stdout
    found = subprocess.run([venv / "bin" / "python", "-c", WHERE], capture_output=True, text=True, check=True)
    number, file = found.stdout.split()
    assert number == version("torch")
    assert Path(file).is_relative_to(sys.prefix), "none was installed"
