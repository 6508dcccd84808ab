"""What a user sees of an error that rannd raises on purpose."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

MODEL = """
import torch
from torch import nn
import pyrannc

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        {body}
        return self.layer(x).sum()

def step(model, x):
    return model(x)

model = Net()
model = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), 0.1){wrapped})
step(model, torch.randn(4, {width}))
"""


@pytest.fixture(autouse=True)
def _forks(forks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fork_server.VARIABLE, str(forks))


def run(folder: Path, *, body: str = "", wrapped: str = "", width: int = 4, code: int = 1, **variables: str) -> str:
    """The error output of a script on one rank, which ends with `code`.

    A signal ends only an interpreter of its own as it ends Python.
    """
    script = folder / "train.py"
    script.write_text(MODEL.format(body=body, wrapped=wrapped, width=width))
    environ = {**os.environ, "RANNC_CONF_DIR": str(folder), "RANNC_CACHE": "off", **variables}
    command = [sys.executable, *([fork_server.__file__] if code > 0 else []), str(script)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stderr


def of_rannd(text: str) -> list[str]:
    """Frames that are not the script's."""
    return [line for line in text.splitlines() if line.startswith("  File ") and "train.py" not in line]


@pytest.mark.parametrize(
    ("changes", "message", "line"),
    [
        ({"RANNC_PARTITION_NUM": "3"}, "rannd.errors.PlanError: 3 stages for 1 device;", "return model(x)"),
        ({"RANNC_MEM_MARGIN": "7"}, "rannd.errors.ConfigError: ", "model = pyrannc.RaNNCModule("),
        ({"wrapped": ", outputs='none'"}, "rannd.errors.UsageError: outputs='none'", "model = pyrannc.RaNNCModule("),
    ],
    ids=["plan", "configuration", "call"],
)
def test_a_refusal_is_the_users_line_and_a_message(
    tmp_path: Path, changes: dict[str, str], message: str, line: str
) -> None:
    text = run(tmp_path, **changes)
    assert line in text
    assert message in text
    assert not of_rannd(text), text
    assert "During handling" not in text


def test_an_error_of_the_models_own_code_is_whole(tmp_path: Path) -> None:
    text = run(tmp_path, body="{}['nothing']")
    assert "{}['nothing']" in text
    assert "KeyError" in text


def test_everything_is_shown_under_debug(tmp_path: Path) -> None:
    text = run(tmp_path, RANNC_PARTITION_NUM="3", RANNC_LOG_LEVEL="debug")
    assert any("rannd/plan" in line for line in of_rannd(text))


def test_after_ctrl_c_it_is_the_line_of_the_script(tmp_path: Path) -> None:
    body = "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    text = run(tmp_path, body=body, code=-signal.SIGINT)
    assert "KeyboardInterrupt" in text
    assert "return model(x)" in text
    assert not of_rannd(text), text
