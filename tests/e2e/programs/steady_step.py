"""Trains, and tells what reads the device in each step: how often rannd's helper does, and which lines beside it.

Also tells whether a step's inputs live longer than the script needs them.

usage: steady_step.py {plain|scaled|clipped|delayed}
       steady_step.py nan STEP     parameters are NaN from this step on; then prints the state
"""

from __future__ import annotations

import contextlib
import gc
import sys
import sysconfig
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import pyrannc
import rannd
from rannd.device import reads

RANND = Path(rannd.__file__).parent
HOST = ("device/reads.py", "runtime/comm/world.py", "runtime/transport/strict_transport.py")
"""The helper that counts, and what reads messages between hosts, whose tensors are the CPU's on every device."""
METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__")
OPERATORS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount", "unique", "allclose")
LOOKS, FIRST = 1, 2
"""The first step in which reads are noted, and the first steady one: what comes before traces, plans, and makes the
optimizer's state."""
TORCH = sysconfig.get_path("purelib")


class Reads(TorchDispatchMode):
    """Notes the lines of rannd that read a tensor, themselves, through torch or in a graph that they run."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[-1]
        if name in OPERATORS or name.startswith(("unique", "_unique")):
            self.note(name)
        return func(*args, **(kwargs or {}))

    def note(self, what: str) -> None:
        """Note a read, if the innermost line that is neither torch's nor generated code is one of rannd's."""
        for frame in reversed(traceback.extract_stack()[:-2]):
            if frame.filename.startswith((TORCH, "<")) or frame.filename == __file__:
                continue
            path = Path(frame.filename)
            if path.is_relative_to(RANND) and str(path.relative_to(RANND)) not in HOST:
                self.lines.add(f"{path.relative_to(RANND)}:{frame.lineno} {what}: {frame.line}")
            return

    def method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """A method of tensors that notes its calls."""

        def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(tensor, *args, **kwargs)

        return noting


class Model(nn.Module):
    """Embedding, normalisation, dropout, and a loss with ignored labels and weighted classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.norm = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1)) for _ in range(4))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, 30))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embedding(ids))
        for layer in self.layers:
            x = x + layer(x)
        logits = x @ self.embedding.weight.t()  # tied: gradients of two stages are summed
        return cross_entropy(logits, labels, weight=self.weights, ignore_index=29) + cross_entropy(logits, labels)


def main() -> None:
    kind = sys.argv[1]
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaled", init_scale=256.0)
    wrapped = pyrannc.RaNNCModule(model, optimizer, scaler=scaler)
    found = Reads()
    pyrannc.delay_grad_allreduce(kind == "delayed")
    for step in range(6):
        ids = torch.randint(29, (8,))
        if kind == "nan" and step == int(sys.argv[2]):
            with torch.no_grad():
                for _, parameter in wrapped.named_parameters(own=True):
                    parameter.fill_(float("nan"))
        found.lines.clear()
        before = reads.count()
        if step == LOOKS:  # where the model is traced once more, as torch has changed
            for name in METHODS:
                setattr(torch.Tensor, name, found.method(name, getattr(torch.Tensor, name)))
        with found if step >= LOOKS else contextlib.nullcontext():
            optimizer.zero_grad()
            scaler.scale(wrapped(ids, ids)).backward()
            if kind == "delayed":
                wrapped.allreduce_grads()
            if kind == "clipped":
                torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        kept = weakref.ref(ids)
        del ids
        gc.collect()
        if step >= FIRST:
            told = (
                f"{reads.count() - before} reads; beside them: {sorted(found.lines)}; inputs kept: {kept() is not None}"
            )
            print(f"step {step}: {told}", flush=True)
    if kind == "nan":
        print(wrapped.state_dict().keys())


if __name__ == "__main__":
    main()
