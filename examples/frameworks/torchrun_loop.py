"""A plain script whose ranks torchrun starts; rannc-run starts it as well.

torchrun --nproc-per-node 2 examples/frameworks/torchrun_loop.py
"""

import torch
from digits_data import datasets, network
from torch.utils.data import DataLoader, DistributedSampler

import pyrannc

train, test = datasets()
net = network()
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
model = pyrannc.RaNNCModule(net, optimizer)
sampler = DistributedSampler(train, pyrannc.get_world_size(), pyrannc.get_rank())
for epoch in range(8):
    sampler.set_epoch(epoch)
    for images, labels in DataLoader(train, batch_size=32, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
model.eval()
images, labels = test.tensors
with torch.no_grad():
    accuracy = (model(images).argmax(1) == labels).float().mean()
if pyrannc.get_rank() == 0:
    print(f"accuracy={accuracy:.3f}")
