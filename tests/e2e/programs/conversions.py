"""A wrapped model is converted where it is not deployed, and refuses to be where it is; compared with one process."""

from __future__ import annotations

import torch
from yardstick import RANK, SIZE, Plain, network, raises, same, train_alike

import pyrannc
from rannd.errors import UsageError

ROWS = [4, 3][:SIZE]

net = network().float()
plain = Plain(net, lambda given: torch.optim.Adam(given, lr=0.01))
assert plain.optimizer is not None
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = pyrannc.RaNNCModule(net, optimizer)
averaged = pyrannc.AveragedModel(model)
model.double()  # before the first call
plain.model.double()
train_alike(model, optimizer, plain, ROWS)
averaged.update_parameters()
raises(UsageError, "(torch.float64 to torch.float16) any more", model.half)
raises(UsageError, "model.undeploy() on all ranks", lambda: model.to(torch.float32))

# After undeploying, as in one process: the optimizer's state is converted when it is loaded.
model.undeploy()
model.float()
plain.model.float()
for each in (optimizer, plain.optimizer):
    each.load_state_dict(each.state_dict())
assert {p.dtype for p in model.parameters()} == {p.grad_dtype for p in model.parameters()} == {torch.float32}
x = torch.ones(3, 8)
optimizer.zero_grad()
plain.optimizer.zero_grad()
model(x).pow(2).sum().backward()
plain.gradients([lambda net: net(x).pow(2).sum()])
optimizer.step()
plain.optimizer.step()
for name, parameter in plain.model.named_parameters():
    found = model.get_param(name)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, parameter.detach())
averaged.update_parameters()  # averages follow their parameters
model.undeploy()
assert {v.dtype for v in averaged.state_dict(rank0_only=False).values() if v.is_floating_point()} == {torch.float32}

# On the meta device: the values that are given are converted, and so are those that the model makes.
for given in (network(seed=5).float().state_dict(), None):
    with torch.device("meta"):
        later = network().float()
    model = pyrannc.RaNNCModule(later, torch.optim.SGD(later.parameters(), lr=0.1))
    if given is not None:
        model.load_state_dict(given)
    model.double()
    model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()
    for name, _ in network().named_parameters():
        found = model.get_param(name)
        assert found.dtype == torch.float64
        assert 0 < found.abs().max() <= 8**-0.5
        if given is not None:
            same(found, given[name], name)
print(f"conversions are right on rank {RANK}", flush=True)
