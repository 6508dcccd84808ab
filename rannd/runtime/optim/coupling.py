"""Whether an optimizer's update of a parameter (or a part) depends on what other ranks may hold: tried on copies."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
import torch.utils._pytree as pytree

from rannd.errors import UsageError
from rannd.runtime.zero.master_weights import HALF

LARGEST = 3
"""Size of each dimension of the parameters that are tried; these have as many dimensions as the real ones."""


class Untried(Exception):
    """The optimizer could not be tried: its step needs more than gradients, or it cannot be copied."""


def couples(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves a parameter otherwise where the others have other gradients.

    Two copies of the optimizer take two steps with small parameters in place of the real ones, which are not touched.
    Those of torch.optim are known.

    Raises:
        Untried: This cannot be told.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    if type(optimizer).__module__.startswith("torch.optim."):
        return False
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if len(trained) < 2:
        return False
    with torch.random.fork_rng(devices=[]):
        one, other = (_moved(optimizer, trained[0], trained[1:], scale) for scale in (1.0, 10.0))
    if not torch.isfinite(one).all() or torch.equal(one, torch.zeros_like(one)):
        raise Untried("its step does not move a parameter")
    return not torch.allclose(one, other, rtol=1e-5, atol=0.0)


NOT_DIVIDED = (
    "{} cannot step a part of a parameter, as ZeRO needs: its update of an element depends on others, or that could "
    "not be tried; set zero_stage=0 (RANNC_ZERO_STAGE=0), or use another optimizer"
)
NO_MASTERS = (
    "{} cannot step master weights: its update of an element depends on others, or that could not be tried; leave "
    "master_weights out, or use another optimizer"
)
NOT_OFFLOADED = (
    "{} cannot step some parameters after others, as offload_optimizer needs: its update of an element depends on "
    "others or on how often it steps, it changes its settings in a step, or that could not be tried; set "
    "offload_optimizer=false (RANNC_OFFLOAD_OPTIMIZER=false), or use another optimizer"
)
ELEMENTWISE = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
)
"""Optimizers of torch.optim that treat each element of a parameter by itself."""


def divides(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of a part of a parameter, flattened, moves it as a step of the whole parameter does.

    Tried as in `couples`; False also if that is not possible.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim."):
        return kind.__name__ in ELEMENTWISE
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or any(p.ndim == 0 for p in trained):
        return False
    largest = max(trained, key=lambda each: each.ndim)
    others = [each for each in trained if each is not largest]
    try:
        with torch.random.fork_rng(devices=[]):
            whole, part = (_moved(optimizer, largest, others, 1.0, part=part) for part in (False, True))
    except Untried:
        return False
    return bool(torch.isfinite(whole).all()) and torch.allclose(whole.reshape(-1)[: len(part)], part, rtol=1e-9, atol=0)


def check_masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """UsageError if a model has parameters that master weights are for, and nobody can step these."""
    if not any(p.requires_grad and p.dtype in HALF for p in model.parameters()):
        return
    if optimizer is None:
        raise UsageError("master_weights=true needs the optimizer that steps them: RaNNCModule(model, optimizer)")
    if not divides(optimizer):
        raise UsageError(NO_MASTERS.format(type(optimizer).__name__))


def check_offload(optimizer: torch.optim.Optimizer | None) -> None:
    """UsageError if nobody can step the optimizer's parameters one after the other."""
    if optimizer is None:
        raise UsageError("offload_optimizer=true needs the optimizer: RaNNCModule(model, optimizer)")
    if not steps_apart(optimizer):
        raise UsageError(NOT_OFFLOADED.format(type(optimizer).__name__))


def may_offload(optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a plan may have the state of this optimizer elsewhere without being asked to (offload_optimizer=auto).

    False where its class may call the step of a base class with all hooks, which would be refused in the step.
    """
    if optimizer is None or not steps_apart(optimizer):
        return False
    bases = () if type(optimizer).__module__.startswith("torch.optim.") else type(optimizer).__mro__[1:]
    return not any(getattr(vars(base).get("step"), "hooked", False) for base in bases)


def steps_apart(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of the class with one parameter after the other are one with all, and move elements by themselves.

    Tried as in `couples`; False also if that is not possible. A class that counts its steps, say, takes too many.
    """
    if not divides(optimizer):
        return False
    if type(optimizer).__module__.startswith("torch.optim."):
        return True
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    settings: list[str] = []
    try:
        with torch.random.fork_rng(devices=[]):
            alone = _moved(optimizer, trained[0], trained[1:], 1.0, settings)
            after = _moved(optimizer, trained[0], trained[1:], 1.0, settings, apart=True)
    except Untried:
        return False
    return torch.equal(alone, after) and settings[0] == settings[1]


def _moved(
    optimizer: Any,
    first: Any,
    others: list[Any],
    scale: float,
    settings: list[str] | None = None,
    *,
    part: bool = False,
    apart: bool = False,
) -> torch.Tensor:
    """How far two steps of a copy move the first parameter, with gradients of the others of this scale.

    `part`: the copy has only the first half of its elements, flattened; `apart`: each step is one of the class for each
    parameter. `settings` gets what the copy has beside parameters and state, as text.
    """
    torch.manual_seed(0)
    small: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for each in group["params"]:
            values = torch.randn([min(size, LARGEST) for size in each.shape], dtype=torch.float64)
            small[id(each)] = torch.nn.Parameter(values, each.requires_grad)
    mine = small[id(first)]
    gradients = {id(first): torch.randn_like(mine)}
    if part:
        half = -(-mine.numel() // 2)
        mine = small[id(first)] = torch.nn.Parameter(mine.detach().reshape(-1)[:half].clone())
        gradients[id(first)] = gradients[id(first)].reshape(-1)[:half]
    torch.manual_seed(int(scale))  # of another direction, too
    gradients |= {id(each): scale * torch.randn_like(small[id(each)]) for each in others}
    before = mine.detach().clone()
    try:
        made = _copy(optimizer, dict(small))
        whole = [group["params"] for group in made.param_groups]
        for _ in range(2):
            for number, gradient in gradients.items():
                small[number].grad = gradient.clone()
            for groups in _one_by_one(made) if apart else [[group["params"] for group in made.param_groups]]:
                for group, params in zip(made.param_groups, groups, strict=True):
                    group["params"] = params
                type(made).step(made)  # a scheduler wraps the object's own step
            for group, params in zip(made.param_groups, whole, strict=True):
                group["params"] = params
    except Exception as exc:  # whatever a user's class raises
        raise Untried(f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__) from exc
    if settings is not None:
        settings.append(_settings(made))
    moved: torch.Tensor = mine.detach() - before
    return moved


def _one_by_one(optimizer: Any) -> list[list[list[Any]]]:
    """For each parameter, what the groups have if they have that one alone."""
    groups = [list(group["params"]) for group in optimizer.param_groups]
    return [[[p for p in params if p is one] for params in groups] for group in groups for one in group]


def _settings(optimizer: Any) -> str:
    """Its groups' settings, and numbers and tensors in its attributes."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    rest = {key: value for key, value in vars(optimizer).items() if key not in ("state", "param_groups")}
    leaves = pytree.tree_leaves((groups, rest))
    return repr([each for each in leaves if isinstance(each, int | float | str | torch.Tensor)])


def _copy(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A copy without state, hooks and what rannd or a scheduler put in place of its methods.

    It has the parameters of `memo`; the optimizers that it holds are copied alike.
    """
    made = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    memo[id(optimizer.state)] = defaultdict(dict)
    for name, value in vars(optimizer).items():
        if isinstance(value, torch.optim.Optimizer):
            made.__dict__[name] = memo[id(value)] if id(value) in memo else _copy(value, memo)
        elif name.startswith("_optimizer_"):
            made.__dict__[name] = OrderedDict()
        elif not name.startswith("_rannd") and not (callable(value) and hasattr(type(optimizer), name)):
            made.__dict__[name] = copy.deepcopy(value, memo)
    return made
