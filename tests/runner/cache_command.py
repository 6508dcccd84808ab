"""`rannc-cache` and `rannd` as a user types them, and entries to look at."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rannd.daemon.client.cache import Client, connect
from rannd.daemon.common import keys

BIN = Path(sys.executable).parent

VERSIONS = {"python": "3.11", "torch": "2.13.0", "rannd": "0.1.0"}
PROFILES = [
    keys.profile_key(block_hash=f"{number:016x}", device_model="cpu", threads=1, versions=VERSIONS, flags={})
    for number in range(100)
]


def deployment(batch: int) -> keys.Key:
    """The key of a deployment for a global batch."""
    return keys.deployment_key(
        graph_hash="abcdef0123456789",
        inputs=[("x", "float32", (64, 512))],
        global_batch=batch,
        world_size=2,
        topology=[(0, 0), (0, 1)],
        device_model="cpu",
        device_memory=1 << 34,
        backend="gloo",
        versions=VERSIONS,
        flags={},
        plan_items={"partition_num": 0},
        optimizer="Adam",
    )


def client() -> Client:
    """As a job has it."""
    return connect(mode="on", timeout_s=60, idle_s=600, max_bytes=1 << 30)


def cache(*words: str) -> subprocess.CompletedProcess[str]:
    """`rannc-cache`, with its output in a pipe."""
    return subprocess.run(
        [str(BIN / "rannc-cache"), *words], capture_output=True, text=True, check=False, timeout=120
    )  # fmt: skip


def on_terminal(*words: str, columns: int = 80) -> str:
    """What the command prints on a terminal, without its styles; to rich, a dumb one always has 80 columns."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "dumb" if columns == 80 else "xterm"}
    with subprocess.Popen([str(BIN / "rannc-cache"), *words], stdout=slave, stderr=slave, env=environment) as command:
        os.close(slave)
        said = b""
        while True:
            try:
                part = os.read(master, 65536)
            except OSError:  # Linux says EIO when the last writer has gone
                break
            if not part:
                break
            said += part
        assert command.wait() == 0
    os.close(master)
    text = said.decode().replace("\r\n", "\n")
    return text if columns == 80 else re.sub(r"\x1b\[[0-9;]*m", "", text)
