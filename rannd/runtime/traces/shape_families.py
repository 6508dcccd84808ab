"""Calls of one family differ in nothing but sizes (of sequences, of images): they share a trace.

How that is traced: rannd.graph.tracing.dynamic_shapes.

The first call of a family is traced for its own sizes. The second one, of other sizes, makes the template that it and
all later ones are made from; it is kept in the cache as traces are.
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
    """It was compared in this run."""
    key: Key | None = None
    """Under which the template is kept, or is to be, until it was compared; None where it cannot be kept."""
    new: bool = False
    """It was made now."""


class Families:
    """The templates of one model. Collective."""

    def __init__(self, context: Context, key_of: Callable[[Signature], Key | None]) -> None:
        self._context = context
        self._world = context.world
        self._key_of = key_of
        self._known: dict[str, _Family] = {}

    def graph(self, signature: Signature, leaves: list[torch.Tensor], state: PythonState) -> ModelGraph | None:
        """The graph of a call out of its family's template; None where there is none, and it has to be traced.

        `state` is the Python state of the modules: another one is another model.
        """
        told = self._world.gather_bytes(signature.key().encode())
        if any(each != told[0] for each in told):
            return None  # ranks that call the model in different ways: tracing tells
        name = signature.family()
        family = self._known.get(name)
        new = family is None or family.state != state
        if self._anywhere(new):  # counters may differ from rank to rank
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
        """What is known about the template of a call's family, see StoredTrace."""
        return self._known[signature.family()].checked

    def keep(self, signature: Signature, checked: str | None) -> None:
        """The template of a call's family can be used; keep it in the cache."""
        family, client = self._known[signature.family()], self._context.cache.client
        if family.key is not None and client is not None and (family.new or checked != family.checked):
            client.put(family.key, pack(StoredTrace("", checked, family.data)))
        family.checked, family.tried, family.key = checked, True, None

    def drop(self, signature: Signature) -> None:
        """The template of a call's family is wrong: every size is traced on its own."""
        family, client = self._known[signature.family()], self._context.cache.client
        if family.key is not None and not family.new and client is not None:
            client.discard(family.key, "it computes something else than the model")
        family.hopeless, family.data, family.key = True, b"", None

    def _anywhere(self, here: bool) -> bool:
        return any(each for (each,) in self._world.gather_numbers([int(here)]))

    def _template(self, family: _Family, signature: Signature, leaves: list[torch.Tensor], broken: str = "") -> None:
        """Give a family its template on all ranks, from the cache or made on rank 0; nothing where there cannot be one.

        `broken` says why the one in the cache cannot be used.
        """
        sizes = ", ".join(f"{signature.tensors[tensor].name}[{dim + 1}]" for tensor, dim in signature.open)
        tensors = list(signature.tensors)
        for tensor, dim in signature.open:
            shape = list(tensors[tensor].shape)
            shape[dim] = 0  # its key is that of no call
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
                    logger.info("Every size of %s is traced on its own: %s", sizes, exc)
        found = self._world.broadcast_bytes(found)
        if found:
            stored = unpack(found)
            family.data, family.checked = stored.data, stored.checked
        else:
            family.data = b""
        family.hopeless = not family.data

    def _readable(self, found: bytes) -> bytes:
        """A template from the cache; nothing where it is none."""
        try:
            if found:
                unpack(found)
        except Broken as exc:
            log.get("RaNNCModule").warning("The cached trace cannot be used: %s", exc)
            return b""
        return found

    def tried(self, signature: Signature) -> bool:
        """Whether this run has compared the template of a call's family."""
        return self._known[signature.family()].tried

    def _instance(self, data: bytes, signature: Signature, leaves: list[torch.Tensor]) -> tuple[ModelGraph | None, str]:
        """The graph of a call, or else what is wrong with the template, if it is to blame."""
        if not data:
            return None, ""
        try:
            traced = instance(data, self._context.model, signature)
        except NoTemplate as exc:
            if self._world.rank == 0:
                log.get("RaNNCModule").info("These sizes are traced on their own: %s", exc)
            return None, ""
        except Broken as exc:
            return None, str(exc)
        try:
            return build(self._context.model, signature, leaves, self._world.device, traced), ""
        except Exception as exc:  # whatever is in it, the model can be traced
            return None, f"no graph can be built from it: {type(exc).__name__}: {exc}"


def _differing(one: Signature, other: Signature) -> list[tuple[int, int]]:
    """(tensor, dimension) of the sizes in which two signatures of a family differ."""
    return [
        (number, dim)
        for number, (first, second) in enumerate(zip(one.tensors, other.tensors, strict=True))
        for dim, (size, different) in enumerate(zip(first.shape, second.shape, strict=True))
        if size != different
    ]
