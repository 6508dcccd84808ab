"""Frameworks over two nodes: as under DistributedDataParallel there, and their checkpoints on either node."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fork_server
import pytest
from network import Network

pytestmark = [pytest.mark.ranks, pytest.mark.long]

PROGRAMS = Path(__file__).parents[1] / "e2e" / "programs"
TWO = {"RANNC_PARTITION_NUM": "2"}


@pytest.mark.parametrize(
    ("program", "layout", "resumed"),
    [
        ("trainer_jobs.py", (), ("Trainer",)),
        ("accelerator_jobs.py", (), ()),
        ("lightning_jobs.py", ("child",), ()),
        ("lightning_jobs.py", ("itself",), ()),
    ],
)
def test_it_trains_as_on_one_node(
    network: Callable[..., Network], program: str, layout: tuple[str, ...], resumed: tuple[str, ...]
) -> None:
    a, b = network(2).made
    folder = a.network.work / "shared"
    folder.mkdir()
    script = (fork_server.__file__, str(PROGRAMS / program))
    for node, hosts, what in ((a, "a:1,b:1", ("parity",)), (a, "a:1,b:1", ("resume",)), (b, "b:2", ("resume",))):
        more = resumed if what == ("resume",) else ()
        code, output = node.run("rannc-run", "--hosts", hosts, *script, *what, str(folder), *layout, *more, **TWO)
        assert code == 0, output
        assert output.count(f"{what[0]} is right") == 2, output
        assert "2 stages: " in output
