"""Trains GPT-2 with DeepSpeed's ZeRO stage 1."""

import deepspeed
import torch
import torch.distributed as dist
from measured_job import CONFIG, STEPS, Clock, tokens
from transformers import GPT2Config, GPT2LMHeadModel

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled at the first start, only for inference
deepspeed.init_distributed(dist_backend="gloo")
clock = Clock()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**CONFIG))
batch = tokens()[dist.get_rank() :: dist.get_world_size()]
clock.built()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
config = {
    "train_micro_batch_size_per_gpu": len(batch),
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
}
model, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

for _ in range(STEPS):
    loss = model(input_ids=batch, labels=batch).loss
    model.backward(loss)
    model.step()
    clock.step(loss)
clock.tell()
dist.destroy_process_group()
