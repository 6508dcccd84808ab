"""The graph of a call on every rank: from the cache, or traced now; the same on all.

A cached trace is kept under the model's fingerprint (rannd.graph.fingerprint.fingerprint), which is taken before
anything is traced. All ranks have to have the same one, and the fingerprint has to see everything that the trace
depends on; otherwise every rank traces. A loaded graph has to have the hash that the stored one had.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from rannd import log
from rannd.daemon.common.keys import Key, hooks_key, trace_key
from rannd.daemon.common.versions import version
from rannd.errors import RanndError, StepError
from rannd.graph.call.call_errors import explained
from rannd.graph.call.signature import Signature
from rannd.graph.fingerprint.fingerprint import Unseen, fingerprint
from rannd.graph.fx.codec import decode, encode
from rannd.graph.fx.encoding import Broken, Uncodable
from rannd.graph.model import ModelGraph, build, trace
from rannd.graph.modules.guards import PythonState
from rannd.runtime.comm.cache_client import tell_miss
from rannd.runtime.comm.context import Context
from rannd.runtime.traces.shape_families import Families
from rannd.runtime.traces.stored_trace import StoredTrace, pack, unpack
from rannd.runtime.traces.trace_checking import TraceChecker
from rannd.sources import CHECKING, TRACING, digest_of


@dataclass(frozen=True)
class _Made:
    """What one rank made of a call."""

    graph: ModelGraph | None = None
    data: bytes = b""
    """For the cache."""
    cached: bool = False
    checked: str | None = None
    """What is known from when it was made, see StoredTrace."""
    stored: StoredTrace | None = None
    """As it was found in the cache."""
    broken: str = ""
    """Why the stored trace cannot be used by anybody."""
    error: RanndError | None = None

    @property
    def decided(self) -> tuple[bool, ...]:
        """What the model's code decided by the call's tensors."""
        decisions = self.graph.traced.decisions if self.graph is not None else None
        return decisions.values if decisions is not None else ()


def other_branches(rank: int) -> str:
    """The message where ranks decide differently in one step."""
    return (
        f"what is in the mini-batch of rank {rank} makes the model's Python code take other branches (`if` on a "
        "tensor) than that of other ranks, but all ranks have to run the same graph in a step: compute such a "
        "condition without a branch (torch.where), or fill the mini-batches of a step alike"
    )


class Tracer:
    """Finds the graphs of one model. Collective."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._world = context.world
        self._checker = TraceChecker(context) if context.config.verify_trace else None
        self._families = Families(context, self._key)
        self._distrusted = False
        self._proven = False
        self._used: Key | None = None
        """Of the latest trace that came from the cache."""
        self.traced = 0
        """Calls that got a trace of their own."""

    def distrust(self, why: str) -> None:
        """Do not take traces from the cache any more: the latest was wrong, and is discarded for later runs."""
        self._distrusted = True
        if self._world.rank == 0:
            log.get("RaNNCModule").warning("The cached trace is wrong, the model is traced anew: %s", why)
        if self._used is not None:
            self._discard(self._used, why)

    def graph(
        self,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        state: PythonState,
        empty: Sequence[torch.Tensor] | None,
    ) -> tuple[ModelGraph, bool]:
        """The graph of calls with `signature`, and whether it came from the cache.

        `state` is the Python state of the model's modules; `empty` are the tensors of the model whose memory holds
        nothing here, None where no rank has any values. An error on one rank, and graphs that differ, are errors on
        all. A new graph is compared with the model.
        """
        home = next((p.device for p in self._context.model.parameters()), self._world.device)
        leaves = [placed(tensor, home).requires_grad_(tensor.requires_grad) for tensor in tensors]
        other = self._families.graph(signature, leaves, state)
        if other is not None:
            self._agree(_Made(other), signature)
            if self._template_holds(other, signature, leaves, empty):
                return other, False
        self.traced += 1
        key = self._key(signature)
        stored = self._find(key) if key is not None else b""
        if not stored:
            self._prove_hooks()
        made, assumed = _Made(), None
        rows = [count for (count,) in self._world.gather_numbers([signature.rows(leaves)])]
        follows = any(rows) and not rows[self._world.rank]  # a mini-batch without rows decides as the others do
        if not follows:
            made = self._make(stored, signature, leaves, None, key)
        if any(rows) and not all(rows):
            told = self._world.gather_bytes(bytes(made.decided))
            if follows:
                first = next(rank for rank, count in enumerate(rows) if count)
                assumed = tuple(map(bool, told[first]))
                made = self._make(stored, signature, leaves, assumed, key)
        self._agree(made, signature)
        if key is not None and made.broken:
            self._discard(key, made.broken)
        made, checked = self._compared(made, signature, leaves, assumed, key, empty)
        graph = made.graph
        assert graph is not None
        if key is not None and made.data:
            self._keep(key, pack(StoredTrace(graph.task.graph_hash, checked, made.data)))
        self._tell(graph)
        # Only some ranks may have been able to use the cached trace.
        cached = bool(stored) and all(each for (each,) in self._world.gather_numbers([int(made.cached)]))
        self._used = key if cached else None
        return graph, cached

    # -- checking ---------------------------------------------------------------------------------------------

    def _compared(
        self,
        made: _Made,
        signature: Signature,
        leaves: list[torch.Tensor],
        assumed: tuple[bool, ...] | None,
        key: Key | None,
        empty: Sequence[torch.Tensor] | None,
    ) -> tuple[_Made, str | None]:
        """A graph that computes what the model computes, and what to store about it. Collective."""
        if self._checker is None or self._from_rank_0(made.checked == ""):
            return made, made.checked

        def retraced(paths: Sequence[str]) -> ModelGraph:
            return self._new(signature, leaves, assumed, False, paths)[0]

        opaque: tuple[str, ...] = ()
        while True:
            assert made.graph is not None
            verdict = self._checker.verdict(made.graph, leaves, empty, opaque, retraced)
            if verdict.checked is not None:
                self._tell_checked(verdict.checked)
                if made.stored is not None and key is not None and verdict.checked != made.checked:
                    self._keep(key, pack(msgspec.structs.replace(made.stored, checked=verdict.checked)))
                return made, verdict.checked
            opaque = verdict.opaque
            if self._world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The traced graph computes something else than the model (%s), which runs as one operator now. "
                    "Please report this model",
                    verdict.line,
                )
            made = self._make(b"", signature, leaves, assumed, key, opaque)
            self._agree(made, signature)

    def _template_holds(
        self,
        graph: ModelGraph,
        signature: Signature,
        leaves: list[torch.Tensor],
        empty: Sequence[torch.Tensor] | None,
    ) -> bool:
        """Whether the graph that was made from a family's template is right. Collective."""
        checked = self._families.checked(signature)
        if self._checker is not None and checked != "" and not self._families.tried(signature):
            verdict = self._checker.verdict(graph, leaves, empty, (), None)
            if verdict.checked is None and self._world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The graph for any size computes something else than the model (%s): every size is traced on its "
                    "own. Please report this model",
                    verdict.line,
                )
            if verdict.checked is None:
                self._families.drop(signature)
                return False
            self._tell_checked(verdict.checked)
            checked = verdict.checked
        self._families.keep(signature, checked)
        return True

    def _prove_hooks(self) -> None:
        """Know which hooks of the tracer torch runs, from an earlier run if it is kept. Collective."""
        if self._proven:
            return
        self._proven = True
        from rannd.graph.tracing import hook_proofs  # it is of no use where traces come from the cache

        client, kept = self._context.cache.client, b""
        versions = {
            "python": platform.python_version(),
            "torch": f"{torch.__version__} {torch.version.git_version}",
            "numpy": np.__version__,
            "rannd": version(),
        }
        key = hooks_key(tracer=digest_of(TRACING), versions=versions)
        if client is not None:
            kept = client.get(key) or b""
        kept = self._world.broadcast_bytes(kept)
        if kept == b"all":
            hook_proofs.assume(())
        elif client is not None and not hook_proofs.failing():  # what fails is tried again in each run
            client.put(key, b"all")

    def _tell_checked(self, reason: str) -> None:
        if reason and self._world.rank == 0:
            log.get("RaNNCModule").info("The trace was not compared with the model: %s", reason)

    def _from_rank_0(self, flag: bool) -> bool:
        return bool(self._world.broadcast_bytes(b"1" if flag else b""))

    # -- making -----------------------------------------------------------------------------------------------

    def _make(
        self,
        stored: bytes,
        signature: Signature,
        leaves: list[torch.Tensor],
        assumed: tuple[bool, ...] | None,
        key: Key | None,
        opaque: Sequence[str] = (),
    ) -> _Made:
        """The graph that is stored, or a new one, on this rank alone."""
        broken = ""
        try:
            if stored:
                try:
                    trace = unpack(stored)
                    graph = self._load(trace, signature, leaves, assumed)
                except Broken as exc:
                    broken = str(exc)
                    log.get("RaNNCModule").warning("The cached trace cannot be used: %s", exc)
                else:
                    if graph is not None:
                        return _Made(graph, cached=True, checked=trace.checked, stored=trace)
            keep = key is not None and (not stored or bool(broken)) and self._world.rank == 0
            graph, data = self._new(signature, leaves, assumed, keep, opaque)
            return _Made(graph, data, broken=broken)
        except RanndError as exc:
            return _Made(broken=broken, error=exc)

    def _new(
        self,
        signature: Signature,
        leaves: list[torch.Tensor],
        assumed: tuple[bool, ...] | None,
        keep: bool,
        opaque: Sequence[str],
    ) -> tuple[ModelGraph, bytes]:
        with explained(self._context.model, signature, leaves):
            traced, signature = trace(self._context.model, signature, leaves, assumed, opaque)
        data = b""
        if keep:
            try:
                data = encode(traced, signature.fixed_rows)
            except Uncodable as exc:
                log.get("RaNNCModule").info("The trace is not kept in the cache: %s", exc)
        return build(self._context.model, signature, leaves, self._world.device, traced), data

    def _load(
        self, stored: StoredTrace, signature: Signature, leaves: list[torch.Tensor], assumed: tuple[bool, ...] | None
    ) -> ModelGraph | None:
        """The graph in a cached trace; None where it is for other calls. Broken where it is for none."""
        traced, rows = decode(stored.data, self._context.model)
        if (rows is not None and rows != signature.rows(leaves)) or signature.rows(leaves) in traced.holes:
            return None
        made = [traced.placeholders[number].meta["val"].shape for number in traced.whole]
        if made != [tuple(leaves[number].shape) for number in traced.whole]:
            return None
        signature = signature.whole(traced.whole, signature.rows(leaves))
        try:
            graph = build(self._context.model, replace(signature, fixed_rows=rows), leaves, self._world.device, traced)
        except Exception as exc:  # whatever is in it, the model can be traced
            raise Broken(f"no graph can be built from it: {type(exc).__name__}: {exc}") from exc
        if graph.task.graph_hash != stored.graph_hash:
            raise Broken("its graph has another hash than the stored one")
        decisions = graph.traced.decisions
        if decisions is not None:
            here = [tensor.to(self._world.device) for tensor in leaves]
            if not (decisions.hold(here) if assumed is None else decisions.values == assumed):
                return None
        return graph

    def _agree(self, made: _Made, signature: Signature) -> None:
        """Raise on every rank where one failed, or where graphs differ."""
        graph = made.graph
        described = (graph.signature if graph is not None else signature).describe()
        decided = "".join(map(str, map(int, made.decided)))
        alone = graph.signature.fixed_rows if graph is not None else None
        decided = f"{decided}/{'' if alone is None else alone}"
        told = f"{graph.task.graph_hash} {decided} {described}" if graph is not None else f"error: {made.error}"
        hashes = [data.decode() for data in self._world.gather_bytes(told.encode())]
        if made.error is not None:
            raise made.error
        failed = [rank for rank, each in enumerate(hashes) if each.startswith("error: ")]
        if failed:
            raise StepError(f"rank {failed[0]} could not trace the model: {hashes[failed[0]].removeprefix('error: ')}")
        graphs = [each.split(" ", 2) for each in hashes]
        different = [rank for rank, each in enumerate(graphs) if (each[0], each[2]) != (graphs[0][0], graphs[0][2])]
        if different:
            (mine, way_here, call_here), (other, way_there, call_there) = (graphs[rank] for rank in (0, different[0]))
            rows_here, rows_there = (way.partition("/")[2] for way in (way_here, way_there))
            if rows_here != rows_there:
                raise StepError(
                    f"the model's code does not leave the number of rows open (the log says where): its graph is for "
                    f"{rows_here or 'any number of'} rows on rank 0, and for {rows_there or 'any number of'} on rank "
                    f"{different[0]}; give all ranks equally many rows"
                )
            if call_here == call_there and way_here != way_there:
                raise StepError(other_branches(different[0]))
            what = (
                f"rank {different[0]} calls the model with {call_there}, rank 0 with {call_here}"
                if call_here != call_there
                else f"ranks {different} have another model than rank 0 (graph {other[:12]}, not {mine[:12]})"
            )
            raise StepError(f"{what}; build the same model and call it in the same way on every rank")

    def _tell(self, graph: ModelGraph) -> None:
        """What the front-end did, on rank 0's log."""
        if self._world.rank != 0:
            return
        logger = log.get("RaNNCModule")
        for line in graph.traced.record:
            logger.info("Tracing: %s", line)
        if "" in graph.traced.leaf_paths:
            logger.warning("The model runs in data parallel only: %s", graph.traced.record[-1])
        for where in graph.traced.changes:
            logger.warning(
                "forward changes attribute %s; that is no part of the graph, and is not done when the graph runs", where
            )

    # -- the cache --------------------------------------------------------------------------------------------

    def _key(self, signature: Signature) -> Key | None:
        """The key of a cached trace, None where there cannot be one. Collective."""
        if self._distrusted or self._context.cache.off:
            return None
        found = fingerprint(self._context.model, signature)
        components = {} if isinstance(found, Unseen) else {**found.components, "checking": digest_of(CHECKING)}
        key = trace_key(components) if components else None
        told = self._world.gather_bytes(b"" if key is None else key.digest.encode())
        if isinstance(found, Unseen):
            log.get("RaNNCModule").info("The trace cannot be cached: %s", found.reason)
        if all(each == told[0] for each in told):
            return key
        if all(told):
            self._tell_difference(components)
        return None

    def _tell_difference(self, components: Mapping[str, str]) -> None:
        """Log what is different in the model of another rank. Collective."""
        told = [msgspec.json.decode(each) for each in self._world.gather_bytes(msgspec.json.encode(components))]
        rank = next((rank for rank, each in enumerate(told) if each != told[0]), 0)
        names = [name for name in told[0] if told[rank].get(name) != told[0][name]]
        if self._world.rank == 0:
            log.get("RaNNCModule").info(
                "The trace cannot be cached: rank %d's model differs from rank 0's in its %s", rank, ", ".join(names)
            )

    def _find(self, key: Key) -> bytes:
        """A stored trace on all ranks, or nothing."""
        found = b""
        client = self._context.cache.client
        if client is not None:
            found = client.get(key) or b""
            if found:
                log.get("RaNNCModule").info("Using trace %s from the cache", key.short)
        found = self._world.broadcast_bytes(found) or self._context.cache.elsewhere(key)
        if not found and client is not None:
            tell_miss(client, key)
        return found

    def _discard(self, key: Key, why: str) -> None:
        if self._context.cache.client is not None:
            self._context.cache.client.discard(key, why)

    def _keep(self, key: Key, data: bytes) -> None:
        if self._context.cache.client is not None:
            self._context.cache.client.put(key, data)


def placed(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    """A tensor of a call where the model is; zeros for one without values, with which a model can be planned."""
    if tensor.is_meta and home.type != "meta":
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=home)
    return tensor.detach().to(home)
