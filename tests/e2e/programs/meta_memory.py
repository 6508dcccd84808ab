"""How much memory a rank needs for a model of 200 MB whose values nobody holds whole; prints MB.

Where values come from: the constructor, the classes' own initialisation, files, torch's checkpoint. Argument: a folder.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import pyrannc

FOLDER = Path(sys.argv[1])
WIDTH, LAYERS = 2048, 12
SIZE_MB = WIDTH * WIDTH * LAYERS * 4 / 1e6


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def resident(kind: str) -> float:
    """Memory in MB: VmRSS now, VmHWM at most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind)) / 1e3


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def constructor(width: int = WIDTH) -> nn.Module:
    with pyrannc.DistributeModelParams():
        return Net(width)


def bare(width: int = WIDTH) -> nn.Module:
    with torch.device("meta"):
        return Net(width)


def write() -> None:
    """Checkpoints, one tensor after the other where the format can."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    names = [f"layers.{number}.weight" for number in range(LAYERS)]
    (FOLDER / "parts").mkdir()
    for number, name in enumerate(names):
        save_file({name: torch.randn(WIDTH, WIDTH)}, FOLDER / "parts" / f"{number}.safetensors")
    index = {"weight_map": {name: f"{number}.safetensors" for number, name in enumerate(names)}}
    (FOLDER / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({name: torch.randn(WIDTH, WIDTH) for name in names}, checkpoint_id=FOLDER / "dcp", no_dist=True)


WAYS = {
    "constructor": (constructor, None),
    "own": (bare, None),
    "files": (bare, FOLDER / "parts"),
    "dcp": (bare, FOLDER / "dcp"),
}


def main() -> None:
    if pyrannc.get_rank() == 0:
        write()
    pyrannc.barrier()
    for make in (constructor, bare):  # what tracing and building import and keep is no matter of the model
        warm = pyrannc.RaNNCModule(make(8))
        warm(torch.randn(2, 8))
        pyrannc.clear()
    x = torch.randn(2, WIDTH)
    for way, (make, path) in WAYS.items():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        forget_peak()
        before = resident("VmRSS")
        inner = make()
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        built = resident("VmHWM") - before
        model = pyrannc.RaNNCModule(inner, optimizer, checkpoint=path)
        with torch.no_grad():
            model(x)
        peak = resident("VmHWM") - before
        held = sum(p.numel() * p.element_size() for p in model.parameters(own=True)) / 1e6
        print(f"{way}: model {SIZE_MB:.0f} built {built:.0f} held {held:.0f} peak {peak:.0f} MB", flush=True)
        pyrannc.clear()
        del model, inner, optimizer


main()
