"""A DataLoader whose workers run the script again: it has no `if __name__ == "__main__":`."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import pyrannc

model = torch.nn.Linear(4, 2)
model = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(8, 4))
for (x,) in DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn"):
    model(x).sum().backward()
