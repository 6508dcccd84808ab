"""Hugging Face's Trainer with a partitioned model, compared with Trainer under DistributedDataParallel.

usage: trainer_jobs.py {parity|smoothed|own|padded|adapters|bfloat16|best} FOLDER
       trainer_jobs.py resume FOLDER {RaNNCTrainer|Trainer}
       trainer_jobs.py models FOLDER NAME..

parity    20 steps in doubles: accumulation, clipping, a schedule of the learning rate, evaluation, checkpoints
smoothed  the same with smoothed labels: the script computes the loss, of all logits
own       a few steps with a compute_loss of the script's own, which reads large logits
padded    rows of different lengths, other ones on each rank, checkpointed activations, and saving in between
adapters  the same with LoRA adapters of PEFT, which alone are trained and saved
bfloat16  five steps under autocast
best      evaluation before training, metrics of predictions, the best model at the end, and a second training
resume    goes on from a checkpoint after 10 steps that `parity` has left, on any number of ranks
models    models of the zoo, a few steps each
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from zoo.decoders import DECODERS
from zoo.entry import Entry

import pyrannc
from pyrannc.integrations.transformers import RaNNCTrainer

RANK, SIZE = pyrannc.get_rank(), pyrannc.get_world_size()
WAY, FOLDER = sys.argv[1], Path(sys.argv[2])
TOKENS, GLOBAL = 1024 if WAY == "own" else 64, 8


class Texts(Dataset[dict[str, Tensor]]):
    """Tokens, of which the first ones count nothing in the loss: so each row has another number of labels."""

    def __init__(self, rows: int, seed: int) -> None:
        self.tokens = torch.randint(3, TOKENS, (rows, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        labels = self.tokens[row].clone()
        labels[: row % 5] = -100
        return {"input_ids": self.tokens[row], "labels": labels}


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows, of which the first tells the length."""
    length = 6 + int(rows[0]["input_ids"][0]) % 7
    return {name: torch.stack([row[name][:length] for row in rows]) for name in rows[0]}


class Batch(Dataset[dict[str, Tensor]]):
    """The rows of a batch."""

    def __init__(self, batch: Mapping[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: values[row] for name, values in self.batch.items()}


def gpt2(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=4, n_head=2, **still)
    )
    return model.to(dtype)


def arguments(name: str, **options: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": GLOBAL // SIZE,
        "per_device_eval_batch_size": GLOBAL // SIZE,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "max_steps": 20,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 10,
    }
    return TrainingArguments(
        str(FOLDER / name), use_cpu=True, report_to=[], seed=3, disable_tqdm=True, **{**given, **options}
    )


def trained(
    kind: type[Trainer], model: nn.Module, train: Dataset[Any], test: Dataset[Any], *, resume: str = "", **options: Any
) -> tuple[Trainer, list[dict[str, float]], dict[str, Tensor]]:
    """(trainer, what it has logged, the whole model's state on rank 0)."""
    told: dict[str, Any] = {"plan_metrics": True} if WAY == "bfloat16" and kind is RaNNCTrainer else {}
    if WAY == "padded":
        told["data_collator"] = padded
    given = arguments(kind.__name__, **options)
    trainer = kind(model=model, args=given, train_dataset=train, eval_dataset=test, **told)
    with contextlib.redirect_stdout(None):
        trainer.train(resume_from_checkpoint=resume or None)
    whole = trainer.model_wrapped if issubclass(kind, RaNNCTrainer) else trainer.model
    return trainer, trainer.state.log_history, whole.state_dict()


def compared(
    ours: tuple[Trainer, list[dict[str, float]], dict[str, Tensor]],
    theirs: tuple[Trainer, list[dict[str, float]], dict[str, Tensor]],
    within: float,
) -> None:
    """What both have logged is alike, and so are the models."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    assert [each.keys() for each in ours[1]] == [each.keys() for each in theirs[1]]
    for here, there in zip(ours[1], theirs[1], strict=True):
        for name in here.keys() & set(names):
            # Trainer adds up losses in floats.
            bound = max(within, 1e-6 if "loss" in name else 0.0)
            assert abs(here[name] - there[name]) <= bound * max(1.0, abs(there[name])), (name, here, there)
    if RANK == 0:
        off = max(float((ours[2][name] - value).abs().max()) for name, value in theirs[2].items())
        assert off <= within, off


def side_by_side(
    make: Callable[[torch.dtype], nn.Module] = gpt2, **options: Any
) -> tuple[Trainer, list[dict[str, float]], dict[str, Tensor]]:
    """Train with both, and compare."""
    theirs = trained(Trainer, make(torch.float64), Texts(200, 1), Texts(24, 2), **options)
    ours = trained(RaNNCTrainer, make(torch.float64), Texts(200, 1), Texts(24, 2), **options)
    if SIZE > 1:
        assert isinstance(theirs[0].model_wrapped, nn.parallel.DistributedDataParallel)
    compared(ours, theirs, 1e-9)
    return ours


def adapters() -> None:
    import peft

    def adapted(dtype: torch.dtype) -> nn.Module:
        model = gpt2(torch.float32)
        chosen = peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True,
                                 modules_to_save=["ln_f"])  # fmt: skip
        return peft.get_peft_model(model, chosen).to(dtype)

    _, _, state = side_by_side(adapted, weight_decay=0.1)
    if RANK == 0:
        saved = FOLDER / "RaNNCTrainer/checkpoint-20"
        assert not list(saved.glob("model*")), "the whole model is written"
        again = peft.PeftModel.from_pretrained(gpt2(torch.float64), str(saved))
        assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())
    resumed = str(FOLDER / "RaNNCTrainer/checkpoint-10")
    *_, gone_on = trained(
        RaNNCTrainer, adapted(torch.float64), Texts(200, 1), Texts(24, 2), resume=resumed, weight_decay=0.1,
        save_strategy="no",
    )  # fmt: skip
    assert RANK or all(torch.equal(gone_on[name], value) for name, value in state.items())


def bfloat16() -> None:
    kinds = (Trainer, {"bf16": True}), (RaNNCTrainer, {"bf16": True}), (RaNNCTrainer, {})
    theirs, ours, floats = (
        [
            each["loss"]
            for each in trained(kind, gpt2(torch.float32), Texts(200, 1), Texts(24, 2), max_steps=5, **options)[1]
            if "loss" in each and ("rannd/samples_per_s" in each) == (kind is RaNNCTrainer)
        ]
        for kind, options in kinds
    )
    assert len(ours) == len(theirs) > 1
    assert max(abs(one - other) for one, other in zip(ours, theirs, strict=True)) < 2e-3, (ours, theirs)
    assert ours[0] != floats[0], "it has computed in floats"


def parity() -> None:
    _, _, state = side_by_side()
    if RANK == 0:
        torch.save(state, FOLDER / "state.pt")
        again = GPT2LMHeadModel.from_pretrained(FOLDER / "RaNNCTrainer/checkpoint-20", dtype=torch.float64)
        assert all(torch.equal(state[name], value) for name, value in again.state_dict().items())


def resume() -> None:
    before = FOLDER / sys.argv[3] / "checkpoint-10"
    _, logged, state = trained(
        RaNNCTrainer, gpt2(torch.float64), Texts(200, 1), Texts(24, 2), resume=str(before), save_strategy="no"
    )
    assert [each["step"] for each in logged if "loss" in each] == list(range(1, 21))
    if RANK == 0:
        saved = torch.load(FOLDER / "state.pt", weights_only=True)
        off = max(float((state[name] - value).abs().max()) for name, value in saved.items())
        assert off <= 1e-9, off


def hits(found: EvalPrediction) -> dict[str, float]:
    """Part of the tokens that are the most likely ones."""
    assert len(found.predictions) == len(found.label_ids) == 24
    return {"hits": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}


def best() -> None:
    def make(kind: type[Trainer]) -> Trainer:
        chosen = arguments(
            kind.__name__, load_best_model_at_end=True, metric_for_best_model="loss", save_steps=5, learning_rate=0.03
        )
        model, train, test = gpt2(torch.float64), Texts(200, 1), Texts(24, 2)
        return kind(model=model, args=chosen, train_dataset=train, eval_dataset=test, compute_metrics=hits)

    told: list[list[dict[str, float]]] = []
    for kind in (Trainer, RaNNCTrainer):
        trainer = make(kind)
        with contextlib.redirect_stdout(None):
            # Trainer, once it has evaluated, trains without DistributedDataParallel: each rank its own model.
            first = (trainer if kind is RaNNCTrainer else make(kind)).evaluate()
            trainer.train()
            steps, better = trainer.state.best_global_step, trainer.evaluate()
            trainer.train()
            third = trainer.evaluate()
            predicted = trainer.predict(Texts(24, 2)).metrics
        told.append([first, {"steps": float(steps or 0)}, better, third, predicted])
    for theirs, ours in zip(*told, strict=True):
        for name in ours.keys() & {"eval_loss", "eval_hits", "steps", "test_loss", "test_hits"}:
            assert abs(ours[name] - theirs[name]) < 1e-6, (name, told)


def own() -> None:
    def compute_loss(self: Trainer, model: nn.Module, inputs: dict[str, Tensor], *_: Any, **__: Any) -> Tensor:
        outputs = model(**inputs)
        if model.training:
            read.append(outputs.logits.detach().mean())
        loss: Tensor = outputs.loss
        return loss

    read: list[Tensor] = []
    runs = []
    for kind in (Trainer, RaNNCTrainer):
        made = type(kind.__name__, (kind,), {"compute_loss": compute_loss})
        options = {"max_steps": 4, "eval_strategy": "no", "save_strategy": "no"}
        runs.append(trained(made, gpt2(torch.float64), Texts(64, 1), Texts(24, 2), **options))
    assert Texts(1, 1).tokens.shape[1] * TOKENS * 8 > 64 << 10, "logits that are not sent if nobody reads them"
    compared(runs[1], runs[0], 1e-9)
    theirs, ours = torch.stack(read).chunk(2)
    assert len(ours) == 8
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def models() -> None:
    for name in sys.argv[3:]:
        (entry,) = (each for each in DECODERS if each.name == name)
        with entry.precision():
            compared(zoo(RaNNCTrainer, entry), zoo(Trainer, entry), 1e-9)
        if RANK == 0:
            print(f"{name} is right", flush=True)


def zoo(kind: type[Trainer], entry: Entry) -> tuple[Trainer, list[dict[str, float]], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = entry.build().to(entry.dtype), entry.batch(64)
    options = {"max_steps": 4, "eval_steps": 4, "save_strategy": "no"}
    return trained(kind, model, Batch(batch), Batch(entry.batch(16)), **options)


def main() -> None:
    if WAY == "smoothed":
        side_by_side(label_smoothing_factor=0.1)
    elif WAY == "padded":
        side_by_side(gradient_checkpointing=True, save_steps=3, max_steps=8)
    else:
        ways = (parity, own, adapters, bfloat16, resume, best, models)
        {way.__name__: way for way in ways}[WAY]()
    print(f"{WAY} is right on rank {RANK}", flush=True)


if __name__ == "__main__":
    main()
