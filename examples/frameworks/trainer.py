"""Hugging Face's Trainer: the class of the trainer is all that differs.

rannc-run -np 2 examples/frameworks/trainer.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from pyrannc.integrations.transformers import RaNNCTrainer as Trainer

# Each row counts on from a random number.
begins = torch.randint(0, 64, (512, 1), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in (begins + torch.arange(16)) % 64]
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=64, n_layer=4, n_head=4, eos_token_id=2))
arguments = TrainingArguments(
    "counting",
    use_cpu=not torch.cuda.is_available(),
    max_steps=60,
    learning_rate=3e-3,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=2,
    logging_steps=20,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:64], plan_metrics=True)
trainer.train()
found = trainer.evaluate()
if trainer.is_world_process_zero():
    print(f"eval_loss={found['eval_loss']:.3f}")
trainer.save_model("counting/last")
