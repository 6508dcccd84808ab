"""Calls of the model inside a RaNNCModule: ``inner(x)`` runs the wrapper, so that methods of the model that call it
(Hugging Face's ``generate``, a ``training_step``) use the deployment, and their gradients are reduced.

torch asks a module for `_compiled_call_impl` in each call, before its hooks run. The attribute is set between calls of
the wrapper and taken away inside them, where rannd itself traces and runs the model.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_ATTRIBUTE = "_compiled_call_impl"


class InnerCalls:
    """Sends calls of `model` to its wrapper, until `stop` is called or the wrapper is gone.

    Args:
        wrapper: The RaNNCModule.
        model: The wrapped model.
        run: Called with the wrapper and a call's arguments.
        deployed: Returns whether the model is deployed. If not, calls outside of training run the model itself: each
            rank still has all of it, and one rank may look at it alone.
    """

    def __init__(
        self, wrapper: nn.Module, model: nn.Module, run: Callable[..., Any], deployed: Callable[[], bool]
    ) -> None:
        self._model = weakref.ref(model)
        self._theirs = model.__dict__.get(_ATTRIBUTE)
        here = weakref.ref(wrapper)  # else only the garbage collector would free a wrapper
        theirs: Callable[..., Any] = type(model)._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            inner, outer = self._model(), here()
            assert inner is not None  # it is being called
            if outer is not None and (deployed() or (inner.training and torch.is_grad_enabled())):
                return run(outer, *args, **kwargs)
            return theirs(inner, *args, **kwargs)

        self.compiled = self._theirs is not None
        """Whether the model's compile() was called."""
        self._set(call)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, calls of the model run the model itself."""
        model = self._model()
        before = None if model is None else model.__dict__.pop(_ATTRIBUTE, None)
        try:
            yield
        finally:
            if before is not None:
                self._set(before)

    def stop(self) -> None:
        """Give the model its own call back."""
        self._set(self._theirs)

    def _set(self, call: Callable[..., Any] | None) -> None:
        model = self._model()
        if model is None:
            return
        model.__dict__.pop(_ATTRIBUTE, None)
        if call is not None:
            model.__dict__[_ATTRIBUTE] = call
