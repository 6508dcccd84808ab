"""Lightning's Trainer with strategy="rannc"; the LightningModule is as it is for any other strategy.

rannc-run -np 2 examples/frameworks/lightning_trainer.py
"""

import lightning.pytorch as pl
import torch
from digits_data import datasets, network
from torch.utils.data import DataLoader

import pyrannc.integrations.lightning


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()  # the one module with parameters is partitioned

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


train, test = datasets()
trainer = pl.Trainer(
    strategy="rannc",
    accelerator="auto",
    max_epochs=8,
    gradient_clip_val=1.0,
    callbacks=[pyrannc.integrations.lightning.RaNNCMetrics()],
    enable_model_summary=False,
)
digits = Digits()
trainer.fit(digits, DataLoader(train, batch_size=32, shuffle=True))
(found,) = trainer.test(digits, DataLoader(test, batch_size=64), verbose=False)
if trainer.is_global_zero:
    print(f"accuracy={found['accuracy']:.3f}")
