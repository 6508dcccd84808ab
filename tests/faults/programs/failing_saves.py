"""Each call for files of a save fails in turn: afterwards a whole checkpoint is there, and a failure was told."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import torch
from faults.faulty import CALLS, ERRORS, Faults
from torch import nn

import pyrannc
from rannd.errors import CheckpointError, RanndError

root = Path(sys.argv[1])
faults = Faults()
torch.manual_seed(0)
net = nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
model = pyrannc.RaNNCModule(net, optimizer)
model(torch.ones(4, 4)).sum().backward()
optimizer.step()
folder = root / "checkpoint"
step = 0


def attempt(call: str = "", number: int = 0, error: int = 0) -> RanndError | None:
    """Save the next step; the error that was raised."""
    global step
    step += 1
    faults.plan(call, number, error)
    try:
        pyrannc.save_checkpoint(folder, model, optimizer, step=step)
        return None
    except CheckpointError as exc:
        return exc
    finally:
        faults.plan()


assert attempt() is None
faults.plan()
step += 1
pyrannc.save_checkpoint(folder, model, optimizer, step=step)
counts = {call: faults.seen(call) for call in CALLS}
last, tried, told, went = step, 0, 0, 0
for call, count in counts.items():
    for number in range(1, count + 1):
        for error in (*ERRORS.values(), *((0,) if call == "write" else ())):
            raised = attempt(call, number, error)
            where = f"{call} {number} of {count} with {errno.errorcode.get(error, 'half of the data')}"
            tried += 1
            assert (folder / "checkpoint.json").exists(), f"{where}: who has no rannd finds no checkpoint; {raised}"
            found = pyrannc.load_checkpoint(folder, model, optimizer).step
            if raised is None:
                went += 1  # a call that may fail, such as one that cleans up, or that is repeated
                assert found == step, f"{where}: nothing was raised, but step {found} is there"
            else:
                told += 1
                assert found in (last, step), f"{where}: step {found} is there, not {last} or {step}"
                assert str(root) in str(raised), f"{where}: {raised}"
            last = found
            left = [path.name for path in root.iterdir() if path != folder]
            assert len(left) <= 2, f"{where}: {left} are left"
assert attempt() is None, "the next save does not go on"
assert [path.name for path in root.iterdir()] == ["checkpoint"], "the next save leaves what others had left"
assert told > tried / 3
print(f"checkpoints: {tried} failing calls, {told} told, {went} without effect; {counts}")
