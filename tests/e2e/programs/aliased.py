"""A Function under another name in the model's own forward: two stages train as one process does."""

from __future__ import annotations

import sys

import torch
from torch import nn

import pyrannc


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos() * 3


activation = Triple.apply


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, a):
        for layer in self.layers:
            a = activation(layer(a))
        return a


def train(model, optimizer, data):
    for a in data:
        optimizer.zero_grad()
        model(a).pow(2).mean().backward()
        optimizer.step()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    net, alone = Net(), Net()
    alone.load_state_dict(net.state_dict())
    data = [torch.randn(4, 8) for _ in range(3)]  # the same on all ranks: the mean over ranks is each one's
    train(alone, torch.optim.AdamW(alone.parameters(), lr=0.01), data)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = pyrannc.RaNNCModule(net, optimizer)
    train(model, optimizer, data)
    for name, value in alone.named_parameters():
        torch.testing.assert_close(model.get_param(name), value.detach(), rtol=1e-9, atol=1e-12)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(data[0]), alone(data[0]), rtol=1e-9, atol=1e-12)
    print(f"rank {pyrannc.get_rank()}: equal", flush=True)


if __name__ == "__main__":
    sys.exit(main())
