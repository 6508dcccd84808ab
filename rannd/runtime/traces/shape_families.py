"""Shares traces between calls of a *family*, which differ only in sizes (of sequences, of images).

The first call of a family is traced for its own sizes. The first one with other sizes creates a *template*, a trace
with dynamic shapes (rannd.graph.tracing.dynamic_shapes), which the graphs of this call and all later ones are made
from. Calls for which the model's code takes other branches get templates of their own, up to a few. Templates are
cached like traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from rannd import log
from rannd.daemon.common.keys import Key
from rannd.graph.call.signature import Signature
from rannd.graph.model import ModelGraph, build
from rannd.graph.python_state.guards import PythonState
from rannd.graph.stored.encoding import Broken
from rannd.graph.tracing.dynamic_shapes import NoTemplate, instance, template
from rannd.runtime.comm.context import Context
from rannd.runtime.traces.stored_trace import StoredTrace, pack, unpack

MOST_TEMPLATES = 4
"""Maximum number of templates of a family."""
MOST_FAILURES = 2
"""Number of templates that could not be traced, or not be used, after which a family gets no more."""


@dataclass
class _Template:
    data: bytes
    checked: str | None
    """See StoredTrace."""
    key: Key | None
    """Cache key of the template until it has been compared; None afterwards, or if it cannot be cached."""
    new: bool
    """Whether the template was traced in this run."""
    tried: bool = False
    """Whether the template was compared with the model in this run."""


@dataclass
class _Family:
    first: Signature
    state: PythonState
    open: tuple[tuple[int, int], ...] = ()
    templates: list[_Template] = field(default_factory=list)
    """The last one used is the first."""
    made: int = 0
    """Number of templates for the present open dimensions, which numbers their cache keys."""
    failures: int = 0


class Families:
    """Templates of one model. All methods are collective."""

    def __init__(self, context: Context, key_of: Callable[[Signature], Key | None]) -> None:
        self._context = context
        self._world = context.world
        self._key_of = key_of
        self._known: dict[str, _Family] = {}

    def graph(self, signature: Signature, leaves: list[torch.Tensor], state: PythonState) -> ModelGraph | None:
        """Make the graph of a call from its family's templates; None if the call has to be traced.

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
        wanted = tuple(sorted({*family.open, *differing}))
        if not differing or any(signature.tensors[tensor].shape[dim] < 2 for tensor, dim in wanted):
            return None  # torch.export treats sizes 0 and 1 differently
        if wanted != family.open:
            family.open, family.templates, family.made, family.failures = wanted, [], 0, 0
        graph = self._of_known(family, signature, leaves)
        if graph is None and family.failures < MOST_FAILURES and len(family.templates) < MOST_TEMPLATES:
            made = self._template(family, replace(signature, open=family.open), leaves)
            if made is not None:
                family.templates.insert(0, made)
                graph = self._of_known(family, signature, leaves)
            family.failures += graph is None
        return graph

    def _of_known(self, family: _Family, signature: Signature, leaves: list[torch.Tensor]) -> ModelGraph | None:
        """Make the graph of a call from one of a family's templates, which becomes the first; None if none fits it."""
        for each in list(family.templates):
            graph, broken = self._instance(each.data, signature, leaves)
            if self._anywhere(bool(broken)):
                self._discard(family, each, broken or "another rank cannot use it")
            elif not self._anywhere(graph is None):
                family.templates.remove(each)
                family.templates.insert(0, each)
                return graph
        return None

    def _discard(self, family: _Family, broken: _Template, why: str) -> None:
        client = self._context.cache.client
        if self._world.rank == 0 and broken.key is not None and client is not None:
            log.get("RaNNCModule").warning("The cached trace %s cannot be used: %s", broken.key.short, why)
            client.discard(broken.key, why)
        family.templates.remove(broken)
        if broken.new:  # not from the cache: another one would be no better
            family.failures = MOST_FAILURES
        else:
            family.made -= 1

    def checked(self, signature: Signature) -> str | None:
        """Result of comparing the template that was used last for a call's family, see `StoredTrace.checked`."""
        return self._used(signature).checked

    def tried(self, signature: Signature) -> bool:
        """Whether the template that was used last for a call's family was compared with the model in this run."""
        return self._used(signature).tried

    def keep(self, signature: Signature, checked: str | None) -> None:
        """Store the template that was used last for a call's family in the cache, after it was checked."""
        used, client = self._used(signature), self._context.cache.client
        if used.key is not None and client is not None and (used.new or checked != used.checked):
            client.put(used.key, pack(StoredTrace("", checked, used.data)))
        used.checked, used.tried, used.key = checked, True, None

    def drop(self, signature: Signature) -> None:
        """Discard the wrong template of a call's family; from now on each size is traced separately."""
        family, client = self._known[signature.family()], self._context.cache.client
        used = self._used(signature)
        if used.key is not None and not used.new and client is not None:
            client.discard(used.key, "its results differ from the model's")
        family.templates, family.failures = [], MOST_FAILURES

    def _used(self, signature: Signature) -> _Template:
        return self._known[signature.family()].templates[0]

    def _anywhere(self, here: bool) -> bool:
        return any(each for (each,) in self._world.gather_numbers([int(here)]))

    def _template(self, family: _Family, signature: Signature, leaves: list[torch.Tensor]) -> _Template | None:
        """The next template of a family, from the cache or traced on rank 0; None if it cannot be traced."""
        sizes = ", ".join(f"{signature.tensors[tensor].name}[{dim + 1}]" for tensor, dim in signature.open)
        tensors = list(signature.tensors)
        for tensor, dim in signature.open:
            shape = list(tensors[tensor].shape)
            shape[dim] = -family.made  # so that the key differs from that of every call
            tensors[tensor] = replace(tensors[tensor], shape=tuple(shape))
        family.made += 1
        key = self._key_of(replace(signature, tensors=tuple(tensors)))
        found, new = b"", False
        if self._world.rank == 0:
            logger = log.get("RaNNCModule")
            client = self._context.cache.client
            if key is not None and client is not None:
                found = self._readable(client.get(key) or b"")
            if found and key is not None:
                logger.debug("Using trace %s for any size of %s from the cache", key.short, sizes)
            else:
                try:
                    logger.debug("Tracing model for any size of %s ...", sizes)
                    found = pack(
                        StoredTrace("", None, template(self._context.model, signature, leaves, self._world.device))
                    )
                    new = True
                except NoTemplate as exc:
                    logger.info("No trace for any size of %s: %s", sizes, exc)
        found = self._world.broadcast_bytes(found)
        if not found:
            return None
        stored = unpack(found)
        return _Template(stored.data, stored.checked, key, self._anywhere(new))

    def _readable(self, found: bytes) -> bytes:
        """Return a cached template if it can be decoded, else b""."""
        try:
            if found:
                unpack(found)
        except Broken as exc:
            log.get("RaNNCModule").warning("The cached trace cannot be used: %s", exc)
            return b""
        return found

    def _instance(self, data: bytes, signature: Signature, leaves: list[torch.Tensor]) -> tuple[ModelGraph | None, str]:
        """Make a graph from a template; returns (graph, ''), or (None, the template's defect or '')."""
        try:
            traced = instance(data, self._context.model, signature)
            follows = not signature.rows(leaves)  # a rank without rows follows the others
            if traced.decisions is not None and not follows and not traced.decisions.hold(leaves):
                return None, ""
            return build(self._context.model, signature, leaves, self._world.device, traced), ""
        except NoTemplate:
            return None, ""
        except Broken as exc:
            return None, str(exc)
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
