"""The first of two stages has nothing to train; GradScaler, norms, the optimizer and its states work all the same.

Argument: a folder for a checkpoint.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import nn

import pyrannc

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)
layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
for layer in layers[:3]:
    layer.requires_grad_(False)
plain = nn.Sequential(*layers[:3], pyrannc.CutPoint(), *layers[3:])
inner = copy.deepcopy(plain)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    half = list(model.parameters())
    return torch.optim.AdamW([{"params": half[:4]}, {"params": half[4:], "lr": 0.1}], lr=0.01)


mine, theirs = optimizer_of(inner), optimizer_of(plain)
model = pyrannc.RaNNCModule(inner, mine)
scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
batches = torch.randn(3, pyrannc.get_world_size(), 4, 8)
for step in range(3):
    mine.zero_grad()
    theirs.zero_grad()
    scalers[0].scale(model(batches[step, pyrannc.get_rank()]).square().mean()).backward()
    scalers[0].unscale_(mine)
    norm = torch.nn.utils.clip_grad_norm_([p for group in mine.param_groups for p in group["params"]], 0.1)
    scalers[0].step(mine)
    scalers[0].update()
    for batch in batches[step]:
        scalers[1].scale(plain(batch).square().mean() / len(batches[step])).backward()
    scalers[1].unscale_(theirs)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    scalers[1].step(theirs)
    scalers[1].update()
    state = mine.state_dict(from_global=False)
    mine.load_state_dict(copy.deepcopy(state))
    held = sum(len(group["params"]) for group in state["param_groups"])
    assert held == len(list(model.parameters(own=True))), "the placeholder does not show"
    assert set(state["state"]) <= set(range(held))
end = model.state_dict(rank0_only=False)
for name, value in plain.state_dict().items():
    torch.testing.assert_close(end[name], value, rtol=1e-9, atol=1e-12)
theirs_state = theirs.state_dict()["state"]


def compare_states() -> None:
    """What the optimizer has, of all parameters, with that of one process."""
    whole = mine.state_dict(from_global=True)
    if pyrannc.get_rank() == 0:
        assert whole["state"].keys() == theirs_state.keys()
        for number, each in theirs_state.items():
            torch.testing.assert_close(whole["state"][number], each, rtol=1e-9, atol=1e-12)


compare_states()
pyrannc.save_checkpoint(sys.argv[1], model, mine)
for state in mine.state.values():
    for value in state.values():
        value.zero_()
pyrannc.load_checkpoint(sys.argv[1], model, mine)
compare_states()
trains = any(parameter.requires_grad for parameter in model.parameters(own=True))
print(f"a rank that trains {'something' if trains else 'nothing'} agrees", flush=True)
model.undeploy()
assert sum(len(group["params"]) for group in mine.param_groups) == len(list(plain.parameters()))
model(batches[0, pyrannc.get_rank()]).square().mean().backward()
mine.step()
