"""A script written for RaNNC, on several ranks: its calls and their arguments, compared with one process.

Arguments: the number of stages; "shared" for gather_inputs=False, where rank 0 alone looks at parameters between steps,
as RaNNC's own tests do.
"""

from __future__ import annotations

import sys

import torch
from yardstick import RANK, SIZE, Plain, batches, network, raises, same

import pyrannc
from rannd.errors import StepError, UsageError

stages, shared = int(sys.argv[1]), sys.argv[2:] == ["shared"]
net = network()
plain = Plain(net, lambda given: torch.optim.Adam(given, lr=0.01))
assert plain.optimizer is not None
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(net, optimizer, not shared, check_unused_values=False)
pyrannc.recreate_all_communicators()


def compare() -> None:
    """What RaNNC's tests compare."""
    for name in sorted(model.name_to_param.keys()):
        same(model.get_param(name, False), dict(plain.model.named_parameters())[name], name)
        same(model.get_param_grad(name, False), dict(plain.model.named_parameters())[name].grad, name)


for step in range(3):
    given = batches(step)
    mine = given[0] if shared else given[RANK]
    pyrannc.delay_grad_allreduce(True)
    model(mine).pow(2).sum().backward()
    raises(StepError, "gradients were not reduced yet", lambda: model.get_param_grad("0.weight"))
    pyrannc.delay_grad_allreduce(False)
    model(mine).pow(2).sum().backward()
    for _ in range(2):
        plain.backward(given[:1] if shared else given)
    compare()
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
    same(model.calc_grad_norm(), norm, "norm")
    model.clip_grad_norm(max_grad_norm=1.0)
    for each in (optimizer, plain.optimizer):
        each.step()
        each.zero_grad()
    if stages == 1 and RANK == 0:  # every rank holds all parameters, so that none has to take part
        compare()

assert model.ready
assert model.state_dict(sync_all_ranks=True).keys() == plain.model.state_dict().keys()
part = model.state_dict(sync_all_ranks=False)
assert part.keys() == plain.model.state_dict().keys()
if RANK == 0:
    same(part["0.weight"], plain.model.state_dict()["0.weight"], "a state on rank 0")
else:
    raises(UsageError, "another rank has", lambda: part["0.weight"].sum())
last = SIZE - 1
state = optimizer.state_dict(from_global=True, to_cpu=True, root=last)  # type: ignore[call-arg]
assert bool(state["state"]) == (last == RANK)
if last == RANK:
    for number, each in plain.optimizer.state_dict()["state"].items():
        same(state["state"][number]["exp_avg_sq"], each["exp_avg_sq"], f"state of parameter {number}")
buf = torch.empty(SIZE, 2)
pyrannc.all_gather(torch.full((2,), float(RANK)), buf)
assert buf.tolist() == [[float(rank)] * 2 for rank in range(SIZE)]
print(f"a script for RaNNC is right on rank {RANK}", flush=True)
