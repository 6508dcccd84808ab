"""What a script may do with a model of which each rank holds a part: nothing reads values that are elsewhere.

With one stage (argument: 1) each rank holds all of it, and everything is as without rannd.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import re
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import pyrannc
from rannd.errors import UsageError

STAGES = int(sys.argv[1])
ELSEWHERE = "this rank uses a state that another rank has"


def trained(net: nn.Module, steps: int, ids: torch.Tensor) -> tuple[Any, torch.optim.Optimizer]:
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    model: Any = pyrannc.RaNNCModule(net, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model, optimizer


torch.manual_seed(0)
config = transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=16, n_positions=16, vocab_size=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
net = transformers.GPT2LMHeadModel(config).double()
net.register_buffer("counted", torch.tensor(7))
ids = torch.randint(3, 32, (4, 8))
model, optimizer = trained(net, 2, ids)
rank = pyrannc.get_rank()

folder = tempfile.mkdtemp()
x = torch.ones(1, 3, 16, dtype=torch.float64)
before = {name: value.clone() for name, value in model.state_dict(rank0_only=False).items()}
uses: dict[str, Callable[[], Any]] = {
    "forward": lambda: net.forward(ids),
    "submodule": lambda: (net.transformer.h[0](x), net.transformer.h[1](x)),
    "save_pretrained": lambda: net.save_pretrained(folder),
    "state_dict": net.state_dict,
    "deepcopy": lambda: copy.deepcopy(net),
    "torch.jit.script": lambda: torch.jit.script(net if STAGES > 1 else net.lm_head),
    "AveragedModel": lambda: torch.optim.swa_utils.AveragedModel(net),
    "pickle": lambda: pickle.dumps(net),
    "torch.save": lambda: torch.save(net, io.BytesIO()),
    "save_model": lambda: safetensors.torch.save_model(net, f"{folder}/model.safetensors"),
    "load_state_dict": lambda: net.load_state_dict(before),
    "load_state_dict of a submodule": lambda: net.transformer.h.load_state_dict(
        {name.removeprefix("transformer.h."): value for name, value in before.items() if ".h." in name}
    ),
    "DistributedDataParallel": lambda: nn.parallel.DistributedDataParallel(net),
    "average": lambda: [p.detach().mul(0.9) for p in net.parameters()],
    "norm": lambda: sum(p.norm() for p in net.parameters()),
    "histogram": lambda: [p.detach().cpu().numpy() for p in net.parameters()],
    "torch.save of the optimizer": lambda: torch.save(optimizer, io.BytesIO()),
    "pickle of the optimizer": lambda: pickle.dumps(optimizer),
    "deepcopy of the optimizer": lambda: copy.deepcopy(optimizer),
}
advice = {
    "save_pretrained": r"call model\.save_pretrained\(\.\.\) of the RaNNCModule, not of the model inside it",
    "deepcopy": r"model\.state_dict\(\) of the RaNNCModule on all ranks.* pyrannc\.AveragedModel.*undeploy\(\)",
    "AveragedModel": r"use pyrannc\.AveragedModel\(model\)",
    "load_state_dict": r"^((?!load_state_dict\().)*call model\.load_state_dict\(state\) of the RaNNCModule",
    "load_state_dict of a submodule": r"call model\.load_state_dict\(state\) of the RaNNCModule",
    "DistributedDataParallel": r"averages gradients over all ranks itself: use it without DistributedDataParallel",
}
"""What to do instead, where it is more than for any other use."""
own_part = r"call optimizer\.state_dict\(from_global=True\) on all ranks"
names = {*dict(net.named_parameters()), *dict(net.named_buffers())}
for name, use in uses.items():
    if STAGES == 1:
        use()
        continue
    print(name, flush=True)
    with pytest.raises(UsageError) as caught:
        use()
    if name.endswith("optimizer"):
        assert re.search(own_part, str(caught.value), re.IGNORECASE), caught.value
        continue
    assert re.search(advice.get(name, r"model\.parameters\(own=True\)"), str(caught.value), re.I), caught.value
    found = re.search(r"needs the values of (\S+) on rank (\d) \(stage (\d)\)", str(caught.value))
    assert found is not None, caught.value
    assert int(found[2]) != rank, caught.value
    assert found[1] in names, caught.value
# What the model is goes on,
whole = transformers.GPT2LMHeadModel(config).double().eval()
assert sum(p.numel() for p in net.parameters()) == sum(p.numel() for p in whole.parameters())
assert all(p.requires_grad and p.dtype == torch.float64 and not p.is_meta for p in net.parameters())
assert len(repr(list(net.parameters()))) > 100
assert len(str(net)) > 100
# and so does training, and what gathers values. A rank that does not get the state cannot save what it has instead.
for gathered in (
    model.state_dict(),
    copy.deepcopy(model.state_dict()),
    dict(model.state_dict()),
    {name: value.detach().cpu().clone() for name, value in model.state_dict().items()},
    {"optimizer": optimizer.state_dict(from_global=True)},
    dict(optimizer.state_dict(from_global=True)),
    pyrannc.AveragedModel(model).state_dict(),
):
    with contextlib.nullcontext() if rank == 0 else pytest.raises(UsageError, match=ELSEWHERE):
        torch.save(gathered, io.BytesIO())
for state in (
    {name: value.clone() for name, value in model.state_dict().items()},
    {name: value.half() for name, value in model.state_dict().items()},
):
    with contextlib.nullcontext() if rank == 0 else pytest.raises(UsageError, match=ELSEWHERE):
        save_file(state, f"{folder}/model.safetensors")
state = model.state_dict(rank0_only=False)
assert not any(value.isnan().any() for value in state.values() if value.is_floating_point())
assert int(state["counted"]) == 7
model.eval()
with torch.no_grad():
    logits = model(input_ids=ids).logits
model.train()
whole.load_state_dict({name: value for name, value in state.items() if name != "counted"})
if torch.distributed.is_initialized():
    every = [torch.empty_like(logits) for _ in range(pyrannc.get_world_size())]
    torch.distributed.all_gather(every, logits.contiguous())
    assert all(torch.equal(each, every[0]) for each in every)
torch.testing.assert_close(logits, whole(ids).logits, rtol=1e-9, atol=1e-9)
model.load_state_dict(state)
model.undeploy()
assert all(torch.equal(p, state[n]) for n, p in net.named_parameters())
assert {type(p) for p in net.parameters()} == {nn.Parameter}
net.save_pretrained(folder)
assert net.generate(ids[:1, :3], max_new_tokens=2, pad_token_id=0).shape[1] > 3
optimizer.zero_grad()
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()

# A wrapped model that was dropped keeps what it had, and no more.
pyrannc.clear()
if STAGES > 1:
    with pytest.raises(UsageError, match=r"undeploy\(\)"):
        pyrannc.RaNNCModule(net)
print(f"absent values are right on rank {rank}", flush=True)
