"""Detect random numbers drawn with numpy or Python's ``random`` instead of torch.

Code that draws them runs once, during tracing, and its result would be a constant of the graph: the same mask in every
step. So a module that draws them is detected and runs as an opaque operator. Code that seeds the generator itself
before it draws gets the same numbers in every step anyway. (Strict export replaces numpy's functions by torch's random
operators, or fails.)
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from rannd.graph.modules.contained_objects import Contents, modules_of
from rannd.graph.modules.source_location import Offence, here
from rannd.patches import MODULE_ENTERED, MODULE_LEFT, Patch, Use, declare, patched

_NUMPY = declare("seeding of numpy", np.random, "seed", "numbers drawn after it are always the same")
_PYTHON = declare("seeding of Python's random", random, "seed", "numbers drawn after it are always the same")

_State = tuple[Any, ...]


class _Generator:
    """A random number generator: get and set its state, draw a number."""

    def __init__(
        self, name: str, get: Callable[[], Any], put: Callable[[Any], object], draw: Callable[[], object]
    ) -> None:
        self.name = name
        self.get = get
        self.put = put
        self.draw = draw
        self.seeded = False
        """User code has seeded it before drawing, so its numbers are always the same."""

    def seen(self) -> Any:
        """The state in a form that can be compared; None if the generator was seeded by user code."""
        return None if self.seeded else _comparable(self.get())


def _comparable(state: Any) -> Any:
    if isinstance(state, dict):
        return tuple((key, _comparable(value)) for key, value in state.items())
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _generators(model: nn.Module, torchs: bool) -> list[_Generator]:
    """The global generators of numpy and Python, and those in attributes of modules; `torchs`: torch's as well."""
    found = [
        _Generator("numpy", partial(np.random.get_state, legacy=False), np.random.set_state, np.random.random),
        _Generator("Python's random", random.getstate, random.setstate, random.random),
    ]
    for where, value in Contents(modules_of(model)).generators:
        if isinstance(value, torch.Generator):
            if torchs:
                draw = partial(torch.rand, (), generator=value, device=value.device)
                found.append(_Generator(where, value.get_state, value.set_state, draw))
        elif isinstance(value, random.Random):
            found.append(_Generator(where, value.getstate, value.setstate, value.random))
        elif isinstance(value, np.random.RandomState):
            get = partial(value.get_state, legacy=False)
            found.append(_Generator(where, get, value.set_state, value.random_sample))
        else:
            bits = value.bit_generator
            get, put = partial(getattr, bits, "state"), partial(setattr, bits, "state")
            found.append(_Generator(where, get, put, value.random))
    return found


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the state of these generators afterwards, including torch.Generators in attributes of modules."""
    before = [(each, each.get()) for each in _generators(model, True)]
    try:
        yield
    finally:
        for each, state in before:
            each.put(state)


def draw_once(model: nn.Module) -> None:
    """Draw from every generator, so that a second run of user code gets other numbers."""
    for each in _generators(model, True):
        each.draw()


@contextlib.contextmanager
def watch_foreign_rng(model: nn.Module) -> Iterator[None]:
    """Raise Offence if a module draws random numbers without torch; restores the generators afterwards."""
    generators = _generators(model, False)
    running: list[tuple[nn.Module, list[Any]]] = []

    def entered(module: nn.Module, _: Any) -> None:
        running.append((module, [each.seen() for each in generators]))

    def left(module: nn.Module, _: Any, __: Any) -> None:
        while running:
            inner, before = running.pop()
            if inner is module:
                break
        else:
            return
        for each, state in zip(generators, before, strict=True):
            if not each.seeded and each.seen() != state:
                raise Offence(
                    f"draws random numbers with {each.name}",
                    here(model),
                    "which a graph would repeat in every step",
                    strict_keeps=each is generators[0],
                )

    seeds = _seeding(_NUMPY, generators[0]), _seeding(_PYTHON, generators[1])
    with unchanged(model), patched(*seeds, MODULE_ENTERED.by(entered), MODULE_LEFT.by(left)):
        yield


def _seeding(patch: Patch, generator: _Generator) -> Use:
    """Patch `seed` to mark a generator that user code seeds before drawing from it."""
    first = generator.seen()

    def seeded(seed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fixed = bool(args or kwargs) and (args or tuple(kwargs.values()))[0] is not None
        if fixed and generator.seen() == first:
            generator.seeded = True
        return seed(*args, **kwargs)

    return patch.around(seeded)
