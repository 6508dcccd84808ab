"""Trains GPT-2 in one process."""

import torch
from measured_job import CONFIG, STEPS, Clock, tokens
from transformers import GPT2Config, GPT2LMHeadModel

clock = Clock()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**CONFIG))
batch = tokens()
clock.built()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(STEPS):
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    clock.step(loss)
clock.tell()
