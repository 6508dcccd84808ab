"""Ray Train: its workers are ranks that Ray has started, so that nothing but the wrapper is needed.

python examples/frameworks/ray_train.py
"""

import tempfile
from pathlib import Path

import torch
from digits_data import datasets, network
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch.utils.data import DataLoader, DistributedSampler

import pyrannc


def train(config):
    train, test = datasets()
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    model = pyrannc.RaNNCModule(net, optimizer)
    loader = DataLoader(train, batch_size=32, sampler=DistributedSampler(train))
    for epoch in range(config["epochs"]):
        loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean()
    if pyrannc.get_rank() == 0:
        Path(config["result"]).write_text(f"accuracy={accuracy:.3f} ranks={pyrannc.get_world_size()}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        result = str(Path(folder, "result"))
        TorchTrainer(
            train,
            train_loop_config={"epochs": 8, "result": result},
            torch_config=TorchConfig(backend="nccl" if torch.cuda.is_available() else "gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
            run_config=RunConfig(storage_path=folder),
        ).fit()
        print(Path(result).read_text())
