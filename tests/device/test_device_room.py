"""The device room on a machine without an accelerator; test_on_a_gpu.py has what only a GPU shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch

from rannd.device import autocast, generators, identity, memory, streams
from rannd.errors import LaunchError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).resolve().parents[2]
here = pytest.mark.skipif(identity.has_accelerator(), reason="this machine has an accelerator")


def test_nothing_else_speaks_of_cuda() -> None:
    """Names of other devices' modules, and comparisons with their types."""
    spoken = re.compile(r"torch\.(cuda|xpu|mps|mtia)\b|type [!=]= .(cuda|xpu|mps)")
    files = [file for file in (ROOT / "rannd").rglob("*.py") if file.parent.name != "device"]
    found = {str(file.relative_to(ROOT)) for file in files if spoken.search(file.read_text())}
    assert found == {
        "rannd/graph/fingerprint/allowlists.py",  # names of modules, which models' code may not read
    }


def test_what_tests_for_a_gpu_name_exists() -> None:
    """They run on few machines, and are skipped elsewhere, so that a name that has gone would stay in them unseen."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    read = 0
    for file in files:
        tree = ast.parse(file.read_text())
        modules: dict[str, ModuleType] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rannd"):
                names: dict[str, object] = {}
                exec(ast.unparse(node), names)
                modules |= {name: value for name, value in names.items() if isinstance(value, ModuleType)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                read += 1
                assert hasattr(modules[node.value.id], node.attr), f"{file.name}:{node.lineno}: {ast.unparse(node)}"
    assert read > 20


def test_a_device_that_has_failed_has_nothing_outstanding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that watches other ranks asks, and has to live on."""

    class Failed:
        def query(self) -> bool:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    issued = streams.Issued(CPU)
    assert not issued.is_outstanding()
    monkeypatch.setattr(issued, "_event", Failed())
    assert not issued.is_outstanding()


@here
def test_without_an_accelerator() -> None:
    assert identity.choose_device("auto", 3) == CPU
    assert identity.choose_device("cpu", 0) == CPU
    with pytest.raises(LaunchError, match="torch sees no CUDA device"):
        identity.choose_device("cuda", 0)
    assert identity.device_identity(CPU) == ""
    assert identity.device_model(CPU).endswith(f"{torch.get_num_threads()} threads")
    assert autocast.usable_autocast_types() == ("cpu",)
    assert generators.devices_in_use() == []
    assert generators.generator_state(CPU) is None


def test_parts_of_a_gpu_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-8f8a,MIG-9f9b")
    assert identity.device_identity(CUDA) == "MIG-8f8a"


def test_memory_of_the_machine_is_shared_by_its_ranks() -> None:
    assert memory.device_memory(CPU, 2) == memory.device_memory(CPU, 1) // 2 > 0
    free, total = memory.free_memory(CPU)
    assert 0 < free <= total == psutil.virtual_memory().total
    memory.release_unused(CPU)


def test_on_the_cpu_everything_has_happened() -> None:
    side = streams.SideStream(CPU)
    with side.inside():
        made = torch.ones(2)
    side.wait_for(side.mark())
    side.lend(made)
    streams.synchronize(CPU)


def test_generators_are_kept_and_seeded() -> None:
    before = torch.get_rng_state()
    with generators.kept_generators():
        generators.seed_all(7)
        first = torch.rand(3)
        generators.seed_all(7)
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), before)
    states = generators.generator_states()
    torch.rand(1)
    generators.set_generator_states(states)
    assert torch.equal(torch.get_rng_state(), before)
