"""Trains GPT-2 with accelerate."""

import torch
from accelerate import Accelerator
from measured_job import CONFIG, STEPS, Clock, tokens
from transformers import GPT2Config, GPT2LMHeadModel

accelerator = Accelerator(cpu=True)
clock = Clock()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**CONFIG))
batch = tokens()[accelerator.process_index :: accelerator.num_processes]
clock.built()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model, optimizer = accelerator.prepare(model, optimizer)

for _ in range(STEPS):
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    accelerator.backward(loss)
    optimizer.step()
    clock.step(loss)
clock.tell()
accelerator.end_training()
