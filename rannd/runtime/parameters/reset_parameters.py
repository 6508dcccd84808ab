"""Initialize a model on the meta device with the initialization methods of its modules.

A model built under ``torch.device("meta")`` has lost the values that its constructors wrote. Its classes can
initialize it again: `reset_parameters` (torch's modules), `_init_weights` (Hugging Face, timm, nanoGPT),
`init_weights` (torchtitan). These run here on the whole model, submodules first, under a Recorder, without memory for
the tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rannd.errors import UsageError
from rannd.runtime.parameters.op_recorder import Recorder

RESETS = ("reset_parameters", "_reset_parameters")


def record_initialisation(model: nn.Module, wanted: set[int], seed: int) -> Recorder:
    """Record the initialization of all modules that contain, also in submodules, tensors of `wanted` (ids).

    All of the model's tensors must be on the meta device. UsageError if the code of a module fails.
    """
    recorder = Recorder(seed)
    with _attributes_kept(model), torch.no_grad():
        for path, module in _inside_out(model):
            if wanted.isdisjoint(map(id, (*module.parameters(), *module.buffers()))):
                continue
            for name, run in _initialisers(module):
                try:
                    with recorder.recording():
                        run()
                except Exception as exc:
                    raise UsageError(
                        f"{type(module).__qualname__}.{name} of module {path or 'the model'} failed while "
                        f"initialising a model on the meta device: {type(exc).__name__}: {str(exc).rstrip('.')}; give "
                        "RaNNCModule a checkpoint, or build the model under pyrannc.DistributeModelParams() instead"
                    ) from exc
    return recorder


def _inside_out(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module after its submodules, in the order of constructors."""
    done: set[int] = set()

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in done:
            return
        done.add(id(module))
        for name, child in module.named_children():
            yield from visit(f"{path}.{name}" if path else name, child)
        yield path, module

    yield from visit("", model)


def _initialisers(module: nn.Module) -> list[tuple[str, Callable[[], object]]]:
    """Initialization methods of a module whose submodules are done: (name, call)."""
    if _is_pretrained(module):
        return [("initialize_weights", lambda: _pretrained(module))]
    found: list[tuple[str, Callable[[], object]]] = []
    name = next((name for name in RESETS if _callable_with(module, name, 0)), None)
    name = name or ("init_weights" if _callable_with(module, "init_weights", 0) else None)
    if name is not None:
        found.append((name, getattr(module, name)))
    if _callable_with(module, "_init_weights", 1):
        found.append(("_init_weights", lambda: module.apply(module._init_weights)))  # type: ignore[arg-type]
    return found


def _callable_with(module: nn.Module, name: str, arguments: int) -> bool:
    method = getattr(type(module), name, None)
    if method is None or not callable(getattr(module, name, None)):
        return False
    try:
        inspect.signature(getattr(module, name)).bind(*[module] * arguments)
    except (TypeError, ValueError):
        return False
    return True


def _is_pretrained(module: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(module, transformers.PreTrainedModel)


def _pretrained(model: Any) -> None:
    """Initialize a Hugging Face model as its constructor does, including modules marked as initialized."""
    for each in model.modules():
        each.__dict__.pop("_is_hf_initialized", None)
    if hasattr(model, "initialize_weights"):
        model.initialize_weights()
    else:
        model.apply(model._init_weights)


@contextlib.contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore module attributes other than tensors after the initialization, since a graph may depend on them."""
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            now = dict(module.__dict__)
            for name in now.keys() - attributes.keys():
                del module.__dict__[name]
            for name, value in attributes.items():
                both = isinstance(value, torch.Tensor) and isinstance(now.get(name), torch.Tensor)
                if not both:
                    module.__dict__[name] = value
