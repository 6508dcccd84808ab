"""Trains GPT-2 with FSDP2."""

import torch
import torch.distributed as dist
from measured_job import CONFIG, STEPS, Clock, tokens
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

dist.init_process_group("gloo")
clock = Clock()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**CONFIG))
batch = tokens()[dist.get_rank() :: dist.get_world_size()]
clock.built()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.transformer.h:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(STEPS):
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    clock.step(loss)
clock.tell()
dist.destroy_process_group()
