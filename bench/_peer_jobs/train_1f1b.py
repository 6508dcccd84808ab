"""Trains GPT-2 in two stages under torch's 1F1B schedule."""

import torch
import torch.distributed as dist
from measured_job import CONFIG, STEPS, Clock, tokens
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformers import GPT2Config, GPT2LMHeadModel


class First(nn.Module):
    def __init__(self, transformer):
        super().__init__()
        self.wte, self.wpe = transformer.wte, transformer.wpe
        self.layers = transformer.h[: len(transformer.h) // 2]

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return x


class Last(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.layers = model.transformer.h[len(model.transformer.h) // 2 :]
        self.ln_f, self.lm_head = model.transformer.ln_f, model.lm_head

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def loss_function(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


dist.init_process_group("gloo")
rank = dist.get_rank()
clock = Clock()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**CONFIG))
tied = model.lm_head.weight
batch = tokens()
clock.built()
model = First(model.transformer) if rank == 0 else Last(model)
stage = PipelineStage(model, rank, 2, torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_function)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

for _ in range(STEPS):
    optimizer.zero_grad()
    losses = []
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, losses=losses)
    dist.all_reduce(tied.grad)  # both stages have a copy of the tied weight
    optimizer.step()
    clock.step(torch.stack(losses).mean() if losses else None)
clock.tell()
dist.destroy_process_group()
