"""Shares one trace between calls of a *family*, which differ only in sizes (of sequences, of images).

The first call of a family is traced for its own sizes. The first one with other sizes creates a *template*, a trace
with dynamic shapes (rannd.graph.tracing.dynamic_shapes), which the graphs of this call and all later ones are made
from. Templates are cached like traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rannd import log
from rannd.daemon.common.keys import Key
from rannd.graph.call.signature import Signature
from rannd.graph.fx.encoding import Broken
from rannd.graph.model import ModelGraph, build
from rannd.graph.modules.guards import PythonState
from rannd.graph.tracing.dynamic_shapes import NoTemplate, instance, template
from rannd.runtime.comm.context import Context
from rannd.runtime.traces.stored_trace import StoredTrace, pack, unpack


@dataclass
class _Family:
    first: Signature
    state: PythonState
    open: tuple[tuple[int, int], ...] = ()
    data: bytes = b""
    hopeless: bool = False
    checked: str | None = None
    """See StoredTrace."""
    tried: bool = False
    """Whether the template was compared with the model in this run."""
    key: Key | None = None
    """Cache key of the template until it has been compared; None afterwards, or if it cannot be cached."""
    new: bool = False
    """Whether the template was traced in this run."""


class Families:
    """Templates of one model. All methods are collective."""

    def __init__(self, context: Context, key_of: Callable[[Signature], Key | None]) -> None:
        self._context = context
        self._world = context.world
        self._key_of = key_of
        self._known: dict[str, _Family] = {}

    def graph(self, signature: Signature, leaves: list[torch.Tensor], state: PythonState) -> ModelGraph | None:
        """Make the graph of a call from its family's template; None if the call has to be traced.

        `state` is the Python state of the modules; a template is valid for one state only.
        """
        told = self._world.gather_bytes(signature.key().encode())
        if any(each != told[0] for each in told):
            return None  # ranks call the model in different ways, which tracing reports
        name = signature.family()
        family = self._known.get(name)
        new = family is None or family.state != state
        if self._anywhere(new):  # the Python state may differ between ranks
            self._known[name] = _Family(signature, state)
            return None
        assert family is not None
        differing = _differing(family.first, signature)
        if not differing or family.hopeless:
            return None
        if not family.data or not set(differing) <= set(family.open):
            family.open = tuple(sorted({*family.open, *differing}))
            self._template(family, replace(signature, open=family.open), leaves)
        graph, broken = self._instance(family.data, signature, leaves)
        if family.data and self._anywhere(bool(broken)):
            self._template(family, replace(signature, open=family.open), leaves, broken or "another rank cannot use it")
            graph, broken = self._instance(family.data, signature, leaves)
            family.hopeless |= self._anywhere(bool(broken))
        return None if self._anywhere(graph is None) else graph

    def checked(self, signature: Signature) -> str | None:
        """Result of comparing the template of a call's family with the model, see `StoredTrace.checked`."""
        return self._known[signature.family()].checked

    def keep(self, signature: Signature, checked: str | None) -> None:
        """Store the template of a call's family in the cache, after it was checked."""
        family, client = self._known[signature.family()], self._context.cache.client
        if family.key is not None and client is not None and (family.new or checked != family.checked):
            client.put(family.key, pack(StoredTrace("", checked, family.data)))
        family.checked, family.tried, family.key = checked, True, None

    def drop(self, signature: Signature) -> None:
        """Discard the wrong template of a call's family; from now on each size is traced separately."""
        family, client = self._known[signature.family()], self._context.cache.client
        if family.key is not None and not family.new and client is not None:
            client.discard(family.key, "its results differ from the model's")
        family.hopeless, family.data, family.key = True, b"", None

    def _anywhere(self, here: bool) -> bool:
        return any(each for (each,) in self._world.gather_numbers([int(here)]))

    def _template(self, family: _Family, signature: Signature, leaves: list[torch.Tensor], broken: str = "") -> None:
        """Set a family's template on all ranks, from the cache or traced on rank 0; b"" if it cannot be traced.

        `broken` says why the cached template cannot be used.
        """
        sizes = ", ".join(f"{signature.tensors[tensor].name}[{dim + 1}]" for tensor, dim in signature.open)
        tensors = list(signature.tensors)
        for tensor, dim in signature.open:
            shape = list(tensors[tensor].shape)
            shape[dim] = 0  # so that the key differs from that of every call
            tensors[tensor] = replace(tensors[tensor], shape=tuple(shape))
        key = self._key_of(replace(signature, tensors=tuple(tensors)))
        found = b""
        family.key, family.checked, family.tried, family.new = key, None, False, False
        if self._world.rank == 0:
            logger = log.get("RaNNCModule")
            client = self._context.cache.client
            if key is not None and client is not None:
                if broken:
                    logger.warning("The cached trace %s cannot be used: %s", key.short, broken)
                    client.discard(key, broken)
                else:
                    found = self._readable(client.get(key) or b"")
            if found and key is not None:
                logger.info("Using trace %s for any size of %s from the cache", key.short, sizes)
            else:
                try:
                    logger.info("Tracing model for any size of %s ...", sizes)
                    found = pack(StoredTrace("", None, template(self._context.model, signature, leaves)))
                    family.new = True
                except NoTemplate as exc:
                    logger.info("Each size of %s is traced separately: %s", sizes, exc)
        found = self._world.broadcast_bytes(found)
        if found:
            stored = unpack(found)
            family.data, family.checked = stored.data, stored.checked
        else:
            family.data = b""
        family.hopeless = not family.data

    def _readable(self, found: bytes) -> bytes:
        """Return a cached template if it can be decoded, else b""."""
        try:
            if found:
                unpack(found)
        except Broken as exc:
            log.get("RaNNCModule").warning("The cached trace cannot be used: %s", exc)
            return b""
        return found

    def tried(self, signature: Signature) -> bool:
        """Whether the template of a call's family was compared with the model in this run."""
        return self._known[signature.family()].tried

    def _instance(self, data: bytes, signature: Signature, leaves: list[torch.Tensor]) -> tuple[ModelGraph | None, str]:
        """Make a graph from a template; returns (graph, ''), or (None, the template's defect or '')."""
        if not data:
            return None, ""
        try:
            traced = instance(data, self._context.model, signature)
        except NoTemplate as exc:
            if self._world.rank == 0:
                log.get("RaNNCModule").info("These sizes are traced separately: %s", exc)
            return None, ""
        except Broken as exc:
            return None, str(exc)
        try:
            return build(self._context.model, signature, leaves, self._world.device, traced), ""
        except Exception as exc:  # cached data may be arbitrarily wrong; the model can still be traced
            return None, f"building a graph from it failed: {type(exc).__name__}: {exc}"


def _differing(one: Signature, other: Signature) -> list[tuple[int, int]]:
    """(tensor, dimension) of each size that differs between two signatures of a family."""
    return [
        (number, dim)
        for number, (first, second) in enumerate(zip(one.tensors, other.tensors, strict=True))
        for dim, (size, different) in enumerate(zip(first.shape, second.shape, strict=True))
        if size != different
    ]
