"""`make setup` where an environment with a torch is active."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from test_packaging import NOT_COPIED

ROOT = Path(__file__).resolve().parents[1]
WHERE = "import torch, rannd; print(torch.__version__, torch.__file__, rannd.__file__, sep='\\n')"


@pytest.mark.long
def test_the_torch_of_an_active_environment_is_used(tmp_path: Path) -> None:
    venv, project = tmp_path / "venv", tmp_path / "project"  # an installation leaves files beside the code
    shutil.copytree(ROOT, project, symlinks=True, ignore=NOT_COPIED)
    shutil.copytree(ROOT / ".ci", project / ".ci")
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "PYTHONPATH", "TORCH")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [project / ".ci" / "setup"],
        env={**inherited, "PATH": path, "VENV": str(venv)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"has torch {version('torch')}: using it" in done.stdout
    command = [venv / "bin" / "python", "-c", WHERE]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    number, file, own = found.stdout.split("\n")[:3]
    assert number == version("torch")
    assert not Path(file).is_relative_to(venv), "none was installed"
    assert Path(own).is_relative_to(project)
