"""The handwritten digits that the examples of this folder classify, and a network for them."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

WIDTH = 128


def datasets():
    """(training images, test images), each with labels, as a dataset of rows of 64 pixels."""
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16.0).float().flatten(1), torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1440], labels[:1440]), TensorDataset(images[1440:], labels[1440:])


def network():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), *layers, nn.Linear(WIDTH, 10))
