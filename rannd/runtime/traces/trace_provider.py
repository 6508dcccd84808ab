"""Provides the graph of a call, from the cache or newly traced; the same on every rank.

The cache key of a trace is the model's fingerprint (rannd.graph.fingerprint.fingerprint), computed without tracing. The
cache is used only if the fingerprint covers everything that the trace depends on and is the same on all ranks;
otherwise every rank traces. A loaded graph must have the same hash as the graph that was stored.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from rannd import log
from rannd.daemon.common.keys import Key, hooks_key, trace_key
from rannd.daemon.common.versions import version
from rannd.errors import RanndError, StepError, TraceError
from rannd.graph.call.call_errors import explained
from rannd.graph.call.signature import Call, Signature
from rannd.graph.call.unread import note_read
from rannd.graph.fingerprint.fingerprint import Unseen, fingerprint
from rannd.graph.fx.traced import Decisions
from rannd.graph.model import ModelGraph, build, trace
from rannd.graph.python_state.guards import PythonState
from rannd.graph.stored.codec import decode, encode
from rannd.graph.stored.encoding import Broken, Uncodable
from rannd.graph.stored.soundness import check_inputs
from rannd.runtime.comm.cache_client import tell_miss
from rannd.runtime.comm.context import Context
from rannd.runtime.parameters.ownership import Parameters
from rannd.runtime.traces.branch_ways import Branches, BranchWays
from rannd.runtime.traces.shape_families import Families
from rannd.runtime.traces.stored_trace import StoredTrace, pack, unpack
from rannd.runtime.traces.trace_checking import TraceChecker
from rannd.runtime.traces.trace_notices import Notices
from rannd.sources import CHECKING, TRACING, digest_of

REFUSED = b"refused:"
"""Begins what is stored, in place of a trace, of calls that cannot be traced as they are: names of what is read."""


@dataclass(frozen=True)
class _Made:
    """Graph of a call on one rank, or the error that prevented it."""

    graph: ModelGraph | None = None
    data: bytes = b""
    """Encoded trace for the cache."""
    cached: bool = False
    checked: str | None = None
    """Result of an earlier comparison with the model, see `StoredTrace.checked`."""
    stored: StoredTrace | None = None
    """The cached trace."""
    broken: str = ""
    """Why the cached trace is invalid."""
    error: RanndError | None = None

    @property
    def decisions(self) -> Decisions | None:
        """Branches that the model's code took depending on the call's tensors."""
        return self.graph.traced.decisions if self.graph is not None else None

    @property
    def decided(self) -> tuple[bool, ...]:
        """Outcomes of the branches."""
        return self.decisions.values if self.decisions is not None else ()


class Tracer:
    """Provides the graphs of one model. All methods are collective."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._world = context.world
        self._checker = TraceChecker(context) if context.config.verify_trace else None
        self._families = Families(context, self._key)
        self._distrusted = False
        self._notices = Notices()
        self._proven = False
        self._last: Key | None = None
        """Key of the last call that was looked up."""
        self._used: Key | None = None
        """Key of the last trace that came from the cache."""
        self._ways = BranchWays(context)
        self.traced = 0
        """Number of calls traced separately, not from a template."""

    def distrust(self, why: str) -> None:
        """Stop using cached traces, because the last one was wrong; it is also discarded for later runs."""
        self._distrusted = True
        if self._world.rank == 0:
            log.get("RaNNCModule").warning("The cached trace is wrong; tracing the model again: %s", why)
        if self._used is not None:
            self._discard(self._used, why)

    def graph(
        self,
        signature: Signature,
        call: Call,
        state: PythonState,
        empty: Sequence[torch.Tensor] | None,
        held: Parameters | None,
    ) -> tuple[ModelGraph, bool]:
        """Graph of calls with `signature`, and whether it came from the cache.

        A new graph is compared with the model. If a rank fails, or graphs differ between ranks, all ranks raise.

        Args:
            signature: Signature of the call.
            call: This rank's call.
            state: Python state of the model's modules.
            empty: Tensors of the model without values on this rank; None if no rank has values.
            held: The model's parameters, once it is deployed.
        """
        self._last = None
        leaves = [placed(tensor, self._world.device).requires_grad_(tensor.requires_grad) for tensor in call.tensors]
        other = self._families.graph(signature, leaves, state)
        if other is not None:
            self._agree(_Made(other), signature)
            if self._template_holds(other, signature, leaves, empty):
                return other, False
        self.traced += 1
        key = self._key(signature)
        stored = self._find(key) if key is not None else b""
        self._last = key
        stored = self._unless_refused(stored)
        if not stored:
            self._prove_hooks()
        made, assumed = self._everywhere(stored, signature, leaves, key)
        while ways := self._agree(made, signature) or self._ways.too_many(made.decisions, signature, held):
            self._ways.join(ways, made.decisions, signature.numbers, held)
            made, assumed = self._everywhere(b"", signature, leaves, key)
        if key is not None and made.broken:
            self._discard(key, made.broken)
        made, checked = self._compared(made, signature, leaves, assumed, key, empty, call.unread_values)
        graph = made.graph
        assert graph is not None
        if key is not None and made.data:
            self._keep(key, pack(StoredTrace(graph.task.graph_hash, checked, made.data)))
        if self._world.rank == 0:
            self._notices.tell(graph, self._context.model)
        # The cached trace may have been usable on some ranks only.
        cached = bool(stored) and all(each for (each,) in self._world.gather_numbers([int(made.cached)]))
        if key is not None and cached:
            self._context.cache.accept(key, stored)
        self._used = key if cached else None
        return graph, cached

    def refusal(self, read: Sequence[str]) -> Callable[[], None]:
        """Prepare to store that the last call cannot be traced as it was: these arguments unread, or numbers inputs."""
        key = self._last

        def store() -> None:
            if key is not None and self._world.rank == 0:
                self._keep(key, REFUSED + msgspec.msgpack.encode(list(read)))

        return store

    def _unless_refused(self, stored: bytes) -> bytes:
        """A stored trace. TraceError on all ranks if an earlier run could not trace the call."""
        if not stored.startswith(REFUSED):
            return stored
        try:
            names = msgspec.msgpack.decode(stored.removeprefix(REFUSED), type=list[str])
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return b""
        if self._last is not None:
            self._context.cache.accept(self._last, stored)
        for name in names:
            note_read(name)
        raise TraceError(f"an earlier run could not trace this call ({', '.join(names) or 'numbers'})")

    def _everywhere(
        self, stored: bytes, signature: Signature, leaves: list[torch.Tensor], key: Key | None
    ) -> tuple[_Made, tuple[bool, ...] | None]:
        """Make the graph on all ranks; also returns the outcomes of branches that a rank without rows follows."""
        made, assumed = _Made(), None
        rows = [count for (count,) in self._world.gather_numbers([signature.rows(leaves)])]
        follows = any(rows) and not rows[self._world.rank]  # a rank without rows takes the branches of the others
        if not follows:
            made = self._make(stored, signature, leaves, None, key, self._ways.opaque)
        if any(rows) and not all(rows):
            told = self._world.gather_bytes(bytes(made.decided))
            if follows:
                first = next(rank for rank, count in enumerate(rows) if count)
                assumed = tuple(map(bool, told[first]))
                made = self._make(stored, signature, leaves, assumed, key, self._ways.opaque)
        return made, assumed

    # -- checking ---------------------------------------------------------------------------------------------

    def _compared(
        self,
        made: _Made,
        signature: Signature,
        leaves: list[torch.Tensor],
        assumed: tuple[bool, ...] | None,
        key: Key | None,
        empty: Sequence[torch.Tensor] | None,
        unread: Mapping[str, Any],
    ) -> tuple[_Made, str | None]:
        """Compare a graph with the model, replacing wrongly traced modules by leaves until the results are equal.

        Returns the correct graph and `StoredTrace.checked`. Collective.
        """
        if self._checker is None or self._from_rank_0(made.checked == ""):
            return made, made.checked

        def retraced(paths: Sequence[str]) -> ModelGraph:
            return self._new(signature, leaves, assumed, False, paths)[0]

        opaque = self._ways.opaque
        while True:
            assert made.graph is not None
            search = None if signature.numbers else retraced
            verdict = self._checker.verdict(made.graph, leaves, empty, opaque, search, unread)
            if verdict.reads:
                for name in verdict.reads:
                    note_read(name)
                raise TraceError(f"the model's code asks for the type of {', '.join(verdict.reads)}: {verdict.line}")
            if signature.numbers and verdict.checked != "":
                raise TraceError(f"numbers cannot be inputs of the graph: {verdict.checked or verdict.line}")
            if verdict.checked is not None:
                self._tell_checked(verdict.checked)
                if made.stored is not None and key is not None and verdict.checked != made.checked:
                    self._keep(key, pack(msgspec.structs.replace(made.stored, checked=verdict.checked)))
                return made, verdict.checked
            opaque = verdict.opaque
            if self._world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The traced graph gives other results than the model (%s), which now runs as one operator. "
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
        """Whether a graph made from a family's template gives the same results as the model. Collective."""
        checked = self._families.checked(signature)
        if self._checker is not None and checked != "" and not self._families.tried(signature):
            verdict = self._checker.verdict(graph, leaves, empty, (), None)
            if verdict.checked is None and self._world.rank == 0:
                log.get("RaNNCModule").warning(
                    "The graph for any size gives other results than the model (%s): each size is traced separately. "
                    "Please report this model",
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
        """Check that torch calls the tracer's hooks, or use the cached result of an earlier run. Collective."""
        if self._proven:
            return
        self._proven = True
        from rannd.graph.tracing import hook_proofs  # not needed if traces come from the cache

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
        elif client is not None and not hook_proofs.failing():  # failures are checked again in each run
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
        """Load the stored graph or trace a new one, on this rank only."""
        broken = ""
        try:
            if stored:
                try:
                    trace = unpack(stored)
                    with self._phase("Loading the model's trace"):
                        graph = self._load(trace, signature, leaves, assumed)
                except Exception as exc:  # cached data may be arbitrarily wrong; the model can still be traced
                    broken = str(exc) if isinstance(exc, Broken) else f"{type(exc).__name__}: {exc}"
                    log.get("RaNNCModule").warning("The cached trace cannot be used: %s", broken)
                else:
                    if graph is not None:
                        return _Made(graph, cached=True, checked=trace.checked, stored=trace)
            keep = key is not None and (not stored or bool(broken)) and self._world.rank == 0
            with self._phase("Tracing the model"):
                graph, data = self._new(signature, leaves, assumed, keep, opaque)
            return _Made(graph, data, broken=broken)
        except RanndError as exc:
            return _Made(broken=broken, error=exc)

    def _phase(self, text: str) -> AbstractContextManager[None]:
        return log.long_phase("RaNNCModule", text, shown=self._world.rank == 0)

    def _new(
        self,
        signature: Signature,
        leaves: list[torch.Tensor],
        assumed: tuple[bool, ...] | None,
        keep: bool,
        opaque: Sequence[str],
    ) -> tuple[ModelGraph, bytes]:
        if self._world.rank == 0:
            more = " for other inputs or another mode" if self.traced > 1 else ""
            log.get("RaNNCModule").log(log.DETAIL, "Tracing model%s ...", more)
        with explained(self._context.model, signature, leaves):
            traced, signature = trace(self._context.model, signature, leaves, self._world.device, assumed, opaque)
        data = b""
        if keep:
            try:
                data = encode(traced, signature.fixed_rows)
            except Uncodable as exc:
                self._notices.tell_uncached([str(exc)])
        return build(self._context.model, signature, leaves, self._world.device, traced), data

    def _load(
        self, stored: StoredTrace, signature: Signature, leaves: list[torch.Tensor], assumed: tuple[bool, ...] | None
    ) -> ModelGraph | None:
        """Build the graph of a cached trace; None if it is for other calls. Broken if the trace is invalid."""
        traced, rows = decode(stored.data, self._context.model)
        if (rows is not None and rows != signature.rows(leaves)) or signature.rows(leaves) in traced.holes:
            return None
        made = [traced.placeholders[number].meta["val"].shape for number in traced.whole]
        if made != [tuple(leaves[number].shape) for number in traced.whole]:
            return None
        signature = signature.whole(traced.whole, signature.rows(leaves))
        check_inputs(traced, signature)
        graph = build(self._context.model, replace(signature, fixed_rows=rows), leaves, self._world.device, traced)
        if graph.task.graph_hash != stored.graph_hash:
            raise Broken("the hash of its graph differs from the stored one")
        decisions = graph.traced.decisions
        if decisions is None or (decisions.hold(leaves) if assumed is None else decisions.values == assumed):
            return graph
        return None

    def _agree(self, made: _Made, signature: Signature) -> list[Branches]:
        """Raise on every rank if one of them failed, or if graphs differ between ranks.

        If they differ because of branches, returns the branches that each rank takes. Collective.
        """
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
            if call_here == call_there and way_here.partition("/")[0] != way_there.partition("/")[0]:
                return self._ways.of_ranks(made.decisions)
            rows_here, rows_there = (way.partition("/")[2] for way in (way_here, way_there))
            if rows_here != rows_there:
                raise StepError(
                    f"the model's code specializes its graph on the number of rows (the log says where): it is for "
                    f"{rows_here or 'any number of'} rows on rank 0, and for {rows_there or 'any number of'} on rank "
                    f"{different[0]}; pass mini-batches of equal size on all ranks"
                )
            what = (
                f"rank {different[0]} calls the model with {call_there}, rank 0 with {call_here}"
                if call_here != call_there
                else f"the model of ranks {different} differs from rank 0's (graph {other[:12]}, not {mine[:12]})"
            )
            pad = "; sizes other than the number of rows are the same on all ranks: pad all to one length"
            advice = (
                f"; build the same model and call it in the same way on every rank{pad * (call_here != call_there)}"
            )
            raise StepError(what + advice)
        return []

    # -- the cache --------------------------------------------------------------------------------------------

    def _key(self, signature: Signature) -> Key | None:
        """Cache key of a trace; None if it cannot be cached. Collective."""
        if self._distrusted or self._context.cache.off:
            return None
        found = fingerprint(self._context.model, signature, self._world.device)
        components = {} if isinstance(found, Unseen) else {**found.components, "checking": digest_of(CHECKING)}
        key = trace_key(components) if components else None
        reason = found.reason if isinstance(found, Unseen) else ""
        gathered = self._world.gather_bytes(
            f"{'' if key is None else key.digest} {reason}".encode(errors="backslashreplace")
        )
        told, _, reasons = zip(*(each.decode().partition(" ") for each in gathered), strict=True)
        if self._world.rank == 0:
            self._notices.tell_uncached(reasons)
        if all(each == told[0] for each in told):
            return key
        if all(told):
            self._tell_difference(components)
        return None

    def _tell_difference(self, components: Mapping[str, str]) -> None:
        """Log how another rank's model differs from rank 0's. Collective."""
        told = [msgspec.json.decode(each) for each in self._world.gather_bytes(msgspec.json.encode(components))]
        rank = next((rank for rank, each in enumerate(told) if each != told[0]), 0)
        names = [name for name in told[0] if told[rank].get(name) != told[0][name]]
        if self._world.rank == 0 and names != ["call"]:  # an error follows, unless ranks without rows follow others
            log.get("RaNNCModule").info(
                "The trace cannot be cached: rank %d's model differs from rank 0's in its %s", rank, ", ".join(names)
            )

    def _find(self, key: Key) -> bytes:
        """Look up a trace in the cache and broadcast it; b"" if there is none."""
        found = b""
        client = self._context.cache.client
        if client is not None:
            found = client.get(key) or b""
            if found:
                log.get("RaNNCModule").debug("Using trace %s from the cache", key.short)
        found = self._world.broadcast_bytes(found) or self._context.cache.elsewhere(key)
        if not found and client is not None:
            tell_miss(client, key)
        return found

    def _discard(self, key: Key, why: str) -> None:
        self._context.cache.discard(key, why)

    def _keep(self, key: Key, data: bytes) -> None:
        if self._context.cache.client is not None:
            self._context.cache.client.put(key, data)


def placed(tensor: torch.Tensor, home: torch.device) -> torch.Tensor:
    """Move a tensor of a call to the device `home`; a meta tensor becomes zeros, which suffice for planning."""
    if tensor.is_meta and home.type != "meta":
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=home)
    return tensor.detach().to(home)
