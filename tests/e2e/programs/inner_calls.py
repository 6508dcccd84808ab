"""Calls of the model inside a RaNNCModule, and its methods that call it, run the plan (argument: stages)."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import pyrannc
from rannd.errors import UsageError

STAGES, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
RANK, RANKS = pyrannc.get_rank(), pyrannc.get_world_size()


class Task(nn.Module):
    """As a LightningModule: the steps call the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.GELU())))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.body(x))
        return result

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def past_itself(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.forward(batch[0]), batch[1])

    @torch.no_grad()
    def predict(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self(x).argmax(-1)
        return result


def task() -> Task:
    torch.manual_seed(3)
    return Task().double()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 8, dtype=torch.float64, generator=generator), torch.randint(3, (6,), generator=generator)


net, plain = task(), task()
before = dict(vars(net))
optimizer, other = torch.optim.Adam(net.parameters(), 1e-2), torch.optim.Adam(plain.parameters(), 1e-2)
if RANK == 0:
    net.predict(batch(0, 0)[0])  # before the first call one rank may look alone
model: Any = pyrannc.RaNNCModule(net, optimizer)
if RANK == 0:
    assert torch.equal(net.predict(batch(0, 0)[0]), plain.predict(batch(0, 0)[0]))
for step in range(4):
    optimizer.zero_grad()
    other.zero_grad()
    loss = (net if step % 2 else model).training_step(batch(step, RANK))
    loss.backward()
    wanted = [plain.training_step(batch(step, rank)) for rank in range(RANKS)]
    (sum(wanted, torch.zeros(())) / RANKS).backward()
    torch.testing.assert_close(loss, wanted[RANK], rtol=1e-12, atol=0)
    optimizer.step()
    other.step()
assert len(model.deployment.stages) == STAGES
model.eval()
x = batch(9, RANK)[0]
assert torch.equal(net.predict(x), plain.predict(x))
torch.testing.assert_close(net(x), model(x), rtol=0, atol=0)
model.train()
for name, value in model.state_dict(rank0_only=False).items():
    torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-10, atol=1e-12)
print("methods that call the model are right", flush=True)

# Past the wrapper: an error where values are elsewhere, a warning where they are not.
if STAGES == 1:
    for _ in range(2):
        optimizer.zero_grad()
        net.past_itself(batch(5, RANK)).backward()
        optimizer.step()
else:
    with pytest.raises(UsageError, match="needs the values of"):
        net.past_itself(batch(5, RANK))

# When it is not deployed, the model runs alone, outside of training.
model.undeploy()
net.eval()
if RANK == 0:
    net(x)
pyrannc.clear()
assert vars(net).keys() == before.keys()
net.train()
if RANK == 0:
    net(x).sum().backward()
pyrannc.barrier()

# Hugging Face.
torch.manual_seed(0)
config = transformers.GPT2Config(
    n_layer=2, n_head=2, n_embd=16, n_positions=32, vocab_size=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip
gpt = transformers.GPT2LMHeadModel(config).double()
alone = transformers.GPT2LMHeadModel(config).double()
alone.load_state_dict(gpt.state_dict())
optimizers = [torch.optim.SGD(each.parameters(), 1e-1) for each in (gpt, alone)]
model = pyrannc.RaNNCModule(gpt, optimizers[0])
ids = torch.randint(3, 32, (4, 8))  # the same on all ranks
for each, optimizer in zip((model, alone), optimizers, strict=True):
    each(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    each.eval()
options: dict[str, Any] = {"max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}
prompt = ids[RANK : RANK + 2, :3]
for each in (gpt, model):
    found = each.generate(prompt, use_cache=False, synced_gpus=True, **options)
    assert torch.equal(found, alone.generate(prompt, **options)), found
    with pytest.raises(UsageError, match=r"generate\(\.\., use_cache=False\)"):
        each.generate(prompt, **options)
print("generate is right", flush=True)

before = dict(vars(config))
for deployed in (True, False):
    if not deployed:
        model.undeploy()
    model.save_pretrained(FOLDER / "saved")  # rank 0 alone writes
    assert vars(config) == before, config  # on every rank, so that nothing is traced again
    pyrannc.barrier()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(FOLDER / "saved", dtype=torch.float64)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], value, rtol=1e-10, atol=1e-12)
    pyrannc.barrier()
    if RANK == 0:
        shutil.rmtree(FOLDER / "saved")
    (FOLDER / "file").touch()
    with pytest.raises(UsageError if RANK else OSError, match="save_pretrained failed on rank 0" if RANK else "file"):
        model.save_pretrained(FOLDER / "file" / "in it")
pyrannc.barrier()
assert not hasattr(pyrannc.RaNNCModule(task()), "save_pretrained")
print("save_pretrained is right", flush=True)

# A model with an encoder, which generate() calls by itself, before all else.
torch.manual_seed(0)
t5 = transformers.T5ForConditionalGeneration(
    transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
)
both = pyrannc.RaNNCModule(t5.double(), torch.optim.SGD(t5.parameters(), 1e-1))
both(input_ids=ids, labels=ids).loss.backward()
both.eval()
both.undeploy()
assert both.module.generate(ids, **options).shape == (4, 10)
both(input_ids=ids, labels=ids)
if len(both.deployment.stages) == 1:
    both.generate(ids, use_cache=False, synced_gpus=True, **options)
elif RANK:
    with pytest.raises(UsageError, match=r"generate\(\) of a model with an encoder .* call model.undeploy\(\)"):
        both.generate(ids, use_cache=False, synced_gpus=True, **options)
pyrannc.barrier()
print("generate with an encoder is right", flush=True)
