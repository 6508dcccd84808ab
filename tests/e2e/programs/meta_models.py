"""Trains models from the meta device on real ranks, and the same models whole in one process: both have to agree.

Prints for each model a digest of the values that it begins with. Arguments: a folder for checkpoints, and "own" for the
models below or "libraries" for those of Hugging Face.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import pyrannc
from rannd.errors import RanndError

FOLDER, WHICH = Path(sys.argv[1]), sys.argv[2]
RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
ROWS, WIDTH = 4, 12
logging.getLogger("transformers").setLevel(logging.ERROR)


class Block(nn.Module):
    """Parameters of torch's own modules, with a mask that is only an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(WIDTH, 2 * WIDTH))
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mask = torch.tril(torch.ones(WIDTH, WIDTH))
        self.rates = [rate.item() for rate in torch.linspace(0.5, 1.0, 3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.down(torch.relu(self.up(x))) @ self.mask) * self.rates[1]


class Made(nn.Module):
    """What only its constructor knows: own parameters, buffers, copied layers, an initialisation at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        )
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        noise = torch.randn(WIDTH)
        self.scale = nn.Parameter(1 + 0.1 * noise)
        self.shift = nn.Parameter(noise * noise)
        self.register_buffer("table", 1.0 / (1 + torch.arange(WIDTH)), persistent=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and not hasattr(module, "parametrizations"):
            nn.init.trunc_normal_(module.weight.data, std=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x = self.encoder(x[:, None] * torch.ones(3, 1, dtype=x.dtype))[:, 0]
        return self.last(x) * self.scale + self.shift * self.table


class Plain(nn.Module):
    """Modules that can initialise themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDTH, padding_idx=0)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.PReLU()) for _ in range(4))
        )
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, 0].abs() * 100).long() % 9
        return self.lstm(self.layers(x + self.table(index))[:, None])[0][:, 0]


def constructed() -> nn.Module:
    with pyrannc.DistributeModelParams():
        model = Made()
    return model


def bare(kind: Callable[[], nn.Module] = Plain) -> nn.Module:
    with torch.device("meta"):
        return kind()


def partly() -> nn.Module:
    """Half of the model has values on every rank, others than rank 0's."""
    model = bare()
    with torch.no_grad():
        torch.manual_seed(7 + RANK)
        model.layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.PReLU())
    return model


def first_rank_only() -> nn.Module:
    torch.manual_seed(8)
    return Plain() if RANK == 0 else bare()


def llama(make: Callable[[Any], nn.Module]) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return make(lambda: transformers.LlamaForCausalLM(config))


def gpt2(make: Callable[[Any], nn.Module]) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return make(lambda: transformers.GPT2LMHeadModel(config))


def under_context(make: Callable[[], nn.Module]) -> nn.Module:
    with pyrannc.DistributeModelParams():
        return make()


def whole(make: Callable[[], nn.Module]) -> nn.Module:
    return make()


def language(batch: torch.Tensor, model: Any) -> torch.Tensor:
    ids = (batch[:, :8].abs() * 1000).long() % 40
    return model(input_ids=ids, labels=ids).loss


def numbers(batch: torch.Tensor, model: Any) -> torch.Tensor:
    return model(batch).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.Adam([{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2]}], lr=0.01)


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.05, initial_accumulator_value=0.3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def frozen(model: nn.Module) -> nn.Module:
    for parameter in list(model.parameters())[:5]:
        parameter.requires_grad_(False)
    return model


def compare(
    name: str, model: nn.Module, again: Callable[[], nn.Module], loss: Any, optimizer: Any, **more: Any
) -> None:
    """Trains on all ranks, and whole on this one from the same values."""
    model = frozen(model.double())
    inner, objects = model, [id(parameter) for parameter in model.parameters()]
    torch.manual_seed(50)
    mine = optimizer(model)
    model = pyrannc.RaNNCModule(model, mine, **more)
    batches = torch.randn(2, SIZE, ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        loss(batches[0, RANK], model)
    begin = model.state_dict(rank0_only=False)
    assert objects == [id(parameter) for parameter in inner.parameters()], "parameters are the same objects"
    assert not any(value.is_meta or value.isnan().any() for value in begin.values())
    digest = hashlib.sha256()
    for key, value in begin.items():
        if "running" not in key and "tracked" not in key:  # the call above was in training mode
            digest.update(key.encode() + value.numpy().tobytes())
    for step in range(2):
        mine.zero_grad()
        loss(batches[step, RANK], model).backward()
        mine.step()
    end = model.state_dict(rank0_only=False)

    emulated = frozen(again().double())
    for module in emulated.modules():
        module.__dict__.update({k: v.double() for k, v in vars(module).items() if isinstance(v, torch.Tensor)})
    emulated.load_state_dict(begin)
    buffers = {key: value.clone() for key, value in emulated.named_buffers()}
    theirs = optimizer(emulated)
    for step in range(2):
        theirs.zero_grad()
        for rank in reversed(range(SIZE)):  # rank 0's buffers win
            for key, value in emulated.named_buffers():
                value.copy_(buffers[key])
            (loss(batches[step, rank], emulated) / SIZE).backward()
        buffers = {key: value.clone() for key, value in emulated.named_buffers()}
        theirs.step()
    for key, value in emulated.state_dict().items():
        worst = float((value - end[key]).abs().max()) / max(float(value.abs().max()), 1e-30)
        assert worst <= 1e-9, f"{name}: {key} differs by {worst}"
    if RANK == 0:
        print(f"{name} begins with {digest.hexdigest()}", flush=True)
    pyrannc.clear()


def checkpoints() -> None:
    """Written by rank 0: one file, two with an index, and torch's."""
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    torch.manual_seed(11)
    state = Plain().state_dict()
    made = Made().state_dict()
    if RANK == 0 and not (FOLDER / "dcp").exists():
        import json

        names = [name for name in made if name != "last.weight"]  # tied: one name is enough
        halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        (FOLDER / "parts").mkdir()
        save_file({name: state[name].clone() for name in state}, FOLDER / "whole.safetensors")
        for file, held in halves.items():
            save_file({name: made[name].clone() for name in held}, FOLDER / "parts" / file)
        index = {"metadata": {}, "weight_map": {name: file for file, held in halves.items() for name in held}}
        (FOLDER / "parts" / "model.safetensors.index.json").write_text(json.dumps(index))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state, "step": 7}, checkpoint_id=FOLDER / "dcp", no_dist=True)
    pyrannc.barrier()


def go_on() -> None:
    """Saved, loaded before the first call, and taken back: the same values, of the optimizer too."""
    batch = torch.randn(SIZE, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))[RANK]

    def wrapped() -> tuple[Any, torch.optim.Optimizer]:
        model = constructed()
        optimizer = adam(model)
        return pyrannc.RaNNCModule(model, optimizer), optimizer

    def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        numbers(batch, model).backward()
        optimizer.step()

    first = wrapped()
    step(*first)
    pyrannc.save_checkpoint(FOLDER / "saved", *first)
    step(*first)
    end, state = first[0].state_dict(rank0_only=False), first[1].state_dict(from_global=True)
    pyrannc.clear()
    model, optimizer = wrapped()
    pyrannc.load_checkpoint(FOLDER / "saved", model, optimizer)
    assert all(parameter.is_meta for parameter in model.parameters()), "nothing is read before a plan is known"
    step(model, optimizer)
    same(end, model.state_dict(rank0_only=False))
    again = optimizer.state_dict(from_global=True)
    assert state.keys() == again.keys()
    if RANK == 0:
        same(state["state"], again["state"])
    model.undeploy()
    same(end, dict(model.state_dict()))
    assert len(list(model.parameters())) == len(list(Made().parameters()))
    step(model, optimizer)
    assert numbers(batch, model).isfinite()
    pyrannc.clear()


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            same(value, other[key])
        else:
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-12)


def refused() -> None:
    """What goes wrong on one rank is told on all."""

    class Drawn(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1][0].weight.data.mul_(random.random())

    if SIZE == 1:
        return
    random.seed(RANK)
    model = pyrannc.RaNNCModule(under_context(Drawn))
    expect("rank 1 would compute other values of [layers.1.0.weight] than rank 0", lambda: model(torch.randn(2, WIDTH)))
    path = FOLDER / ("whole.safetensors" if RANK else "nowhere.safetensors")
    expect("nowhere.safetensors is not there", lambda: pyrannc.RaNNCModule(bare(), checkpoint=path))
    pyrannc.clear()


def expect(text: str, act: Callable[[], object]) -> None:
    said = "nothing"
    try:
        act()
    except RanndError as exc:
        said = str(exc)
    assert text in said, said


def libraries() -> None:
    for family in (llama, gpt2):
        for make in (bare, under_context):
            compare(f"{family.__name__} {make.__name__}", family(make), lambda: family(whole), language, adam)  # noqa: B023


def own() -> None:
    compare("constructed", constructed(), Made, numbers, adagrad)
    compare("plain", bare(), Plain, numbers, adam)
    compare("partly", partly(), Plain, numbers, momentum)
    compare("first rank only", first_rank_only(), Plain, numbers, momentum)
    checkpoints()
    compare("safetensors", bare(), Plain, numbers, momentum, checkpoint=FOLDER / "whole.safetensors")
    compare("safetensors in parts", constructed(), Made, numbers, adam, checkpoint=FOLDER / "parts")
    compare("dcp", bare(), Plain, numbers, adam, checkpoint=FOLDER / "dcp")
    go_on()
    refused()


def main() -> None:
    torch.manual_seed(100 + RANK)
    torch.set_default_dtype(torch.float64)
    own() if WHICH == "own" else libraries()
    print("all agree", flush=True)


main()
