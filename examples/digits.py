"""Classifies scikit-learn's handwritten digits (1797 images of 8 x 8 pixels) with a small convolutional network.

    rannc-run -np 2 examples/digits.py
    python examples/digits.py

A step uses the same BATCH images with any number of ranks: each rank takes its share of them, also of the last, smaller
batch of an epoch. BatchNorm normalises over the share of a rank, as under DistributedDataParallel. The test images are
divided among the ranks as well, and the numbers of correct predictions are summed.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import pyrannc

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError:
    raise SystemExit("this example needs scikit-learn: pip install '.[examples]'") from None

BATCH = 64
"""Images per step, over all ranks."""


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(self.block(1, 32), self.block(32, 32), nn.MaxPool2d(2), self.block(32, 64))
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
        )

    @staticmethod
    def block(channels_in, channels_out):
        convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU())

    def forward(self, images):
        return self.classifier(self.features(images))


def load(device):
    """Load (images, labels) for training and for testing; the same on every rank."""
    digits = load_digits()
    parts = train_test_split(digits.images / 16.0, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    images, test_images, labels, test_labels = (torch.as_tensor(part, device=device) for part in parts)
    return (images.float().unsqueeze(1), labels), (test_images.float().unsqueeze(1), test_labels)


def accuracy(model, images, labels):
    """Fraction of the images that are classified correctly. Each rank evaluates its own share."""
    rank, ranks = pyrannc.get_rank(), pyrannc.get_world_size()
    mine = slice(rank, None, ranks)
    model.eval()
    with torch.no_grad():
        right = (model(images[mine]).argmax(dim=1) == labels[mine]).sum().cpu()
    model.train()
    if ranks > 1:
        dist.all_reduce(right)
    return right.item() / len(images)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    rank, ranks = pyrannc.get_rank(), pyrannc.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    (images, labels), test = load(device)

    model = ConvNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model = pyrannc.RaNNCModule(model, optimizer)

    shuffle = torch.Generator().manual_seed(args.seed)  # all ranks draw the same order
    for epoch in range(args.epochs):
        for batch in torch.randperm(len(images), generator=shuffle).split(BATCH):
            mine = batch[rank::ranks]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
        scheduler.step()
        if rank == 0:
            print(f"epoch={epoch} loss={loss.item():.4f} lr={scheduler.get_last_lr()[0]:.5f}", flush=True)

    found = accuracy(model, *test)
    if rank == 0:
        print(f"test accuracy={found:.4f} of {len(test[1])} images", flush=True)
    print(f"Finished on rank{rank}", flush=True)


if __name__ == "__main__":
    main()
