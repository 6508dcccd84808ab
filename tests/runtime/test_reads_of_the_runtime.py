"""Nothing in the runtime reads a device but through rannd/device/reads.py, which counts."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import pyrannc
import rannd
from rannd.device.reads import LateReads
from rannd.runtime.comm import world

RUNTIME = Path(rannd.__file__).parent / "runtime"
METHODS = frozenset({"item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "allclose"})
"""What waits for values of tensors, unless they are those of `read`."""
NUMBERS = frozenset({"float", "int", "bool"})
STEADY = ("execution", "gradients", "transport")
"""Folders whose code runs in each step: there, Python's conversions are looked at, too."""
AUDIT = (
    "auditor",
    "differences",
    "origins",
    "parameter_gradients",
    "record_exchange",
    "step_audit",
    "step_record",
)
ALLOWED = {
    **dict.fromkeys([f"audit/{name}.py" for name in AUDIT], "the one step that is audited"),
    "comm/world.py": "messages between hosts are on the CPU",
    "transport/strict_transport.py": "runs on CPUs alone",
    "comm/gather_objects.py": "states that are gathered",
    "averaged_model.py": "states that are gathered",
    "calls/equal_batches.py": "the first call",
    "module.py": "state_dict and get_param, for which the script asks",
    "session.py": "the gradient that the script asks for",
    "deployment/undeploy.py": "ends a deployment",
    "optim/coupling.py": "tries an optimizer once, at deployment",
    "optim/state_codec.py": "states that are gathered",
    "parameters/op_tape.py": "initial values",
    "parameters/ownership.py": "initial values",
    "parameters/state_dict.py": "states that are gathered",
    "storage/torch_archive.py": "files",
}
"""Files that read tensors, but of no steady step."""
PLAIN = frozenset(
    {
        "int(value.dtype.itemsize)",
        "int(wanted)",
        "int(waits)",
        "bool(counted)",
        "bool(local)",
        "int(bool(counted))",
        "int(bool(local))",
        "float(most)",
        "float(norm_type)",
        "float('nan')",
        "float('inf')",
        "bool(told[holder][place])",
    }
)
"""Conversions of what is no tensor."""
ON_THE_HOST = frozenset(
    {
        "self._flat(gradients).tolist()",
        "told.item()",
        "torch.equal(rounded.view(torch.int16), values.view(torch.int16))",
    }
)
"""Of tensors that are on the CPU already: where values are read at once."""


def _reads(text: str, *, steady: bool) -> list[str]:
    """Expressions that read a tensor."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        told, function = ast.unparse(node), node.func
        if isinstance(function, ast.Attribute):
            moves = function.attr == "to" and any(ast.unparse(each) == "'cpu'" for each in node.args)
            if (function.attr in METHODS or moves) and not ast.unparse(function.value).startswith("read("):
                found.append(told)
        elif steady and isinstance(function, ast.Name) and function.id in NUMBERS and node.args:
            inner = node.args[0]
            is_read = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "read"
            if not is_read and told not in PLAIN:
                found.append(told)
    return [each for each in found if each not in ON_THE_HOST]


@pytest.mark.parametrize("file", sorted(RUNTIME.rglob("*.py")), ids=lambda file: str(file.relative_to(RUNTIME)))
def test_a_file_of_the_runtime_reads_no_device(file: Path) -> None:
    name = str(file.relative_to(RUNTIME))
    found = _reads(file.read_text(), steady=file.parent.name in STEADY)
    if name in ALLOWED:
        assert found, f"{name} reads nothing any more; it has no place in ALLOWED"
    else:
        assert found == [], "use rannd.device.reads: LateReads in each step, `read` elsewhere"


def test_all_ways_to_read_are_found() -> None:
    text = "a.item(); b.tolist(); c.cpu(); d.to('cpu', copy=True); float(e.sum()); torch.equal(f, g); read(h).item()"
    assert len(_reads(text, steady=True)) == 6
    assert len(_reads(text, steady=False)) == 5


def test_values_of_models_that_were_dropped_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NaN of one experiment must not end the next one."""
    late, found = LateReads(torch.device("cpu"), late=True), list[float]()
    monkeypatch.setattr(world, "_world", SimpleNamespace(reads=late))
    late.add(torch.ones(1), found.extend)
    pyrannc.clear()
    late.settle()
    assert not found
