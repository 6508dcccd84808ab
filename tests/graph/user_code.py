"""Models whose code is written by a test: modules from texts, as a user's files are."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from pieces import signature_of
from torch import nn

from rannd.graph.fingerprint.fingerprint import Fingerprint, Unseen, fingerprint


@contextmanager
def modules(folder: Path, sources: Mapping[str, str]) -> Iterator[dict[str, types.ModuleType]]:
    """Write files `name.py` into a folder and import them, in order; they are forgotten at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, types.ModuleType] = {}
    try:
        for name, source in sources.items():
            path = folder / f"{name}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = loaded[name] = importlib.util.module_from_spec(spec)
            exec(compile(source, path, "exec"), vars(module))  # no bytecode file: two texts may have one time
        yield loaded
    finally:
        for name in loaded:
            del sys.modules[name]


def seen(model: nn.Module, *args: object, **kwargs: object) -> Fingerprint:
    """The fingerprint of a call of a model that hides nothing."""
    found = answer(model, *args, **kwargs)
    assert isinstance(found, Fingerprint), found
    return found


def answer(model: nn.Module, *args: object, **kwargs: object) -> Fingerprint | Unseen:
    """The fingerprint of a call, by default with a batch of three rows of four numbers."""
    signature, _ = signature_of(model, *(args or (torch.ones(3, 4),)), **kwargs)
    return fingerprint(model, signature, torch.device("cpu"))


def differences(one: Fingerprint, other: Fingerprint) -> set[str]:
    """The components in which two fingerprints differ."""
    assert one.components.keys() == other.components.keys()
    return {name for name, text in one.components.items() if other.components[name] != text}
