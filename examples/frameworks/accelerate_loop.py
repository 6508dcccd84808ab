"""A training loop of Hugging Face Accelerate: the class of the accelerator is all that differs.

rannc-run -np 2 examples/frameworks/accelerate_loop.py
"""

import torch
from digits_data import datasets, network
from torch.utils.data import DataLoader

from pyrannc.integrations.accelerate import RaNNCAccelerator as Accelerator

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
train, test = datasets()
model = network()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer, train, test = accelerator.prepare(
    model, optimizer, DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
)
for _ in range(8):
    for images, labels in train:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.save_state("state")
model.eval()
with torch.no_grad():
    right = [accelerator.gather_for_metrics(model(images).argmax(1) == labels) for images, labels in test]
accelerator.print(f"accuracy={torch.cat(right).float().mean():.3f}")
accelerator.end_training()
