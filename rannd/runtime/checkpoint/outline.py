"""What a checkpoint is of, and what ranks say of it beside values: random numbers, the optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from rannd.errors import UsageError
from rannd.runtime.averaged_model import AveragedModel
from rannd.runtime.checkpoint.content import Content, class_name, put_averages, put_model, put_optimizer
from rannd.runtime.checkpoint.manifest import check_plain
from rannd.runtime.checkpoint.rng_state import random_state
from rannd.runtime.checkpoint.script_state import LARGEST
from rannd.runtime.comm.world import World
from rannd.runtime.optim.local_optimizer import WholeOptimizer
from rannd.runtime.optim.state_codec import NamedState, merge
from rannd.runtime.parameters.initial_values import InitialValues
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.storage.sealing import seal


@dataclass(frozen=True)
class Subject:
    """What a checkpoint is of."""

    model: nn.Module
    parameters: Parameters | None
    """Who holds what; None where every rank has the whole model."""
    position: tuple[int, int]
    """Seed and number of calls of the model's random operators."""
    optimizer: WholeOptimizer | None = None
    scheduler: Any = None
    scaler: Any = None
    values: InitialValues | None = None
    """Of a model that waits for its values (meta device): what is loaded is read when it is deployed."""
    averaged: AveragedModel | None = None

    def check(self) -> None:
        """UsageError for what cannot be saved or loaded."""
        if self.optimizer is not None and (self.parameters is not None or self.values is not None):
            whole = self.optimizer
            if not whole.attached or (self.parameters is not None and self.parameters not in whole.members):
                raise UsageError(
                    "the optimizer was not given to RaNNCModule, so that nobody knows which rank has which part of its "
                    "state; wrap the model with RaNNCModule(model, optimizer)"
                )
            wrong = whole.check_groups()
            if wrong:
                raise UsageError(wrong)
        for name in ("scheduler", "scaler"):
            each = getattr(self, name)
            if each is not None and not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                raise UsageError(f"{name} is a {type(each).__qualname__}, which has no state_dict and load_state_dict")


def outline(world: World, subject: Subject, content: Content, prefix: str, step: int | None, extra: Any) -> bytes:
    """Fill the content with what this rank writes, and return all the rest that it knows. Not collective.

    UsageError for what cannot be saved.
    """
    if step is not None and (not isinstance(step, int) or isinstance(step, bool)):
        raise UsageError(f"step is {step!r}; a whole number is wanted")
    wrong = check_plain(extra, "extra")
    if wrong:
        raise UsageError(wrong)
    subject.check()
    put_model(content, world, subject.parameters, subject.model, prefix)
    if subject.averaged is not None:
        put_averages(content, world, subject.parameters, subject.averaged)
    said: dict[str, Any] = {"rng": random_state(world.device), "position": subject.position}
    if subject.optimizer is not None:
        said["optimizer"] = vars(put_optimizer(content, subject.optimizer, subject.model))
        said["class"] = class_name(subject.optimizer.optimizer)
    if subject.averaged is not None:
        said["averaged"] = subject.averaged.n_averaged
    if world.rank == 0:
        said["extra"] = extra
        for name in ("scheduler", "scaler"):
            each = getattr(subject, name)
            if each is not None:
                said[name] = each.state_dict()
                seal(said[name], f"the state of {name}")
    return seal(said, "the state of the script")


def script_of(told: list[dict[str, Any]], step: int | None) -> bytes:
    """Return the content of the file of the script's state; `told`: what the ranks' outlines say."""
    first = told[0]
    script: dict[str, Any] = {
        "step": step,
        "extra": first["extra"],
        "rng": [each["rng"] for each in told],
        "position": first["position"],
        "scheduler": first.get("scheduler"),
        "scaler": first.get("scaler"),
        "optimizer": None,
    }
    if "averaged" in first:
        script["averaged"] = first["averaged"]
    if "optimizer" in first:
        parts = [NamedState[str](**each["optimizer"]) for each in told]
        script["optimizer"] = {"class": first["class"], **vars(merge(parts))}
        del script["optimizer"]["pieces"]
    data = seal(script, "the state of the script")
    if len(data) > LARGEST:
        raise UsageError(
            f"step, extra, scheduler, scaler and settings have {len(data)} bytes, more than {LARGEST}; what is large "
            "belongs into the model or the optimizer's state of parameters, or into a file of its own"
        )
    return data
