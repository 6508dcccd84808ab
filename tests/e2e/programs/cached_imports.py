"""Trains a model without an optimizer of torch's, whose constructor imports torch._dynamo.

Leaves the names of the modules that torch alone does not import in the folder that it is given, in its rank's file.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

ALONE = set(sys.modules)

import pyrannc  # noqa: E402

if __name__ == "__main__":
    torch.manual_seed(0)
    model = pyrannc.RaNNCModule(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2)))
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters(own=True):
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    Path(sys.argv[1], str(pyrannc.get_rank())).write_text(json.dumps(sorted(set(sys.modules) - ALONE)))
