"""The audit of one step as every rank sees it: which step, what cannot be audited, and the verdict."""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rannd import log
from rannd.device.generators import drawing_from, kept_generators, other_states
from rannd.device.reads import read
from rannd.errors import AuditError
from rannd.graph.tracing.leaf_recorder import preserved
from rannd.profile.out_of_memory import is_out_of_memory
from rannd.runtime.audit.auditor import Auditor
from rannd.runtime.audit.differences import Differs
from rannd.runtime.audit.origins import StepFacts
from rannd.runtime.audit.record_exchange import RecordExchange, Tensors
from rannd.runtime.audit.step_record import Key, StepRecord
from rannd.runtime.binding.bound_graph import BoundGraph
from rannd.runtime.binding.microbatches import Pieces
from rannd.runtime.comm.context import Context
from rannd.runtime.gradients.autograd_inputs import Anchor
from rannd.runtime.gradients.scaling import Factor
from rannd.runtime.parameters.ownership import Parameters
from rannd.units import count_text


class StepAudit:
    """One step: keeps what it needs of it on each rank, and replays it when its gradients are delivered."""

    def __init__(
        self, context: Context, bound: BoundGraph, parameters: Parameters, number: int, call: int, seed: int
    ) -> None:
        """`number`: the step, as the user counts them; `call`, `seed`: see `piece_seed`."""
        self.number = number
        self.done = False
        self.equal = False
        """Whether it was replayed, and equals its replay."""
        self.record = StepRecord(bound.graph.traced.graph, parameters)
        self._context = context
        self._world = context.world
        self._bound = bound
        self._parameters = parameters
        self._call = call
        self._seed = seed
        self._digests: dict[str, torch.Tensor] = {}
        """Of the values that this rank has computed with."""

    # -- what is kept ---------------------------------------------------------------------------------------------

    def reduction(self, kind: str, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Keep gradients of parameters before ("local") or after ("reduced") their reduction."""
        self.record.gradients(kind, gradients)

    def mini_batch(self, leaves: Sequence[torch.Tensor], whole: Sequence[torch.Tensor] | None) -> None:
        """Keep this rank's tensors, after forward; `whole`: the mini-batch that all ranks share."""
        for kind, tensors in (("leaf", leaves), ("whole", whole if self._world.rank == 0 else None)):
            for place, each in enumerate(tensors or ()):
                self.record.named(kind, place, tensors={"": each})
        self._digests = self._digests_now()

    def outputs(self, outputs: Sequence[Any]) -> None:
        """Keep what the call returns on this rank."""
        self.record.named("outputs", tensors=_numbered(outputs))

    def before_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Keep the gradients of the outputs, and those that parameters have already."""
        if not self.done:
            self.record.named("given", tensors=_numbered(gradients))
            self.record.gradients("grad before", self._gradients())

    def _gradients(self) -> dict[str, torch.Tensor | None]:
        held = self._parameters
        return {name: held.tensors[name].grad for name in held.trainable()}

    # -- the verdict ----------------------------------------------------------------------------------------------

    def finish(
        self,
        found: Sequence[torch.Tensor | None],
        *,
        pieces: Pieces,
        inside: bool,
        seed: Factor,
        anchor: Anchor,
        reduced: bool,
    ) -> None:
        """Replay the step, after its gradients were delivered. Collective.

        Args:
            found: Gradients of this rank's tensors.
            pieces: Microbatches of the step.
            inside: Whether backward ran inside the call.
            seed: The gradient of the loss that it started with then.
            anchor: Knows whether only some gradients were wanted.
            reduced: Whether gradients were reduced.

        Raises:
            AuditError: Something differs, or the replay raised an error; on all ranks.
        """
        if self.done:
            return
        self.done = True
        world, begun = self._world, time.monotonic()
        why = self._refusal(anchor, reduced=reduced)
        with world.watch.inside("audit"):
            told = [each.decode() for each in world.gather_bytes(why.encode())]
        why = next(filter(None, told), "")
        if why:
            self.refuse(why)
            return
        self.record.named("input gradients", tensors=_numbered(found))
        self.record.gradients("grad after", self._gradients())
        for name in self._parameters.trainable():
            tensor = self._parameters.tensors[name]
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
                self.record.named("hooked", name, tensors={"": torch.ones(())})
        start = float(read(seed)) if isinstance(seed, torch.Tensor) else float(seed)
        averaged = self._context.averaged
        divided = (
            averaged if inside and seed == 1.0 and not isinstance(seed, torch.Tensor) else 1
        )  # as Executor.forward
        facts = StepFacts(self._call, self._seed, pieces, inside, start, averaged, divided)
        exchange = RecordExchange(world, self._find)
        where, before = world.watch.where, world.watch.where.preparing
        text: bytes | None = None
        cause: Exception | None = None
        with world.watch.inside("audit"), _untouched():
            where.preparing = True  # the watchdog has to wait for rank 0
            if world.rank:
                exchange.serve()
            else:
                try:
                    verdict = self._verdict(facts, exchange, begun)
                except Exception as exc:
                    verdict, cause = self._failed(exc), exc
                text = verdict.encode()
                exchange.done()
            where.preparing = before
            text = world.broadcast_bytes(text)
        self.record.clear()
        if text:
            raise AuditError(text.decode()) from cause
        self.equal = True

    def _failed(self, exc: Exception) -> str:
        """What is told of an error in the replay."""
        advice = " (a smaller mini-batch may fit)" if is_out_of_memory(exc) else ""
        return (
            f"step {self.number} could not be replayed on rank 0{advice}: {type(exc).__name__}: {exc}. The step "
            "itself ran; without verify_step (rannc-run --verify) training goes on after it"
        )

    def refuse(self, why: str) -> None:
        """Tell that the step is not audited, and let go of what was kept of it."""
        self.done = True
        self.record.clear()
        _warn(self._context, self.number, why)

    def _digests_now(self) -> dict[str, torch.Tensor]:
        """Of parameters, and of buffers that no stage writes."""
        written = self._bound.graph.placement.written
        names = [name for name in self._parameters.own if name not in written]
        return {name: _digest(self.record.find(("tensor", name))[""]) for name in names}

    def _refusal(self, anchor: Anchor, *, reduced: bool) -> str:
        """Why a step cannot be audited; empty: it can."""
        if not reduced:
            return "its gradients wait for a later reduction (no_sync, delay_grad_allreduce)"
        if anchor.asked() is not None:
            return "its backward was asked for some gradients only (torch.autograd.grad, backward(inputs=..))"
        for name, digest in self._digests_now().items():
            if not torch.equal(digest, self._digests[name]):
                return f"{name} has other values than in its forward: does a hook step an optimizer in backward?"
        return ""

    def _verdict(self, facts: StepFacts, exchange: RecordExchange, begun: float) -> str:
        """Rank 0's: the first difference; empty if there is none."""
        logger = log.get("RaNNCModule")
        has_leaves = bool(self._bound.graph.traced.leaf_paths)
        with preserved(self._context.model) if has_leaves else contextlib.nullcontext():
            auditor = Auditor(self._world, self._bound, self._parameters, facts, exchange, self.record.label)
            try:
                auditor.run()
            except Differs as difference:
                text = (
                    f"step {self.number} differs from its replay: {difference}. What was compared before it is equal. "
                    "Please report this, unless the model has state that a graph cannot contain"
                )
                logger.error("%s", text)
                return text
        audited = len(auditor.blocks) - len(auditor.unsure)
        for block in auditor.unsure:
            logger.warning(
                "step %d: %s gives other results in each run, so it could not be audited; does it draw random numbers "
                "other than torch's, or count its calls?",
                self.number,
                block,
            )
        for block in list(auditor.spoilt)[:1]:
            logger.warning("step %d: %s computes NaN; what is NaN on both sides counts as equal", self.number, block)
        logger.info(
            "Step %d %s: %d values, %d gradients and %d buffers of %s and %s, in %.1f s",
            self.number,
            "equals its replay" if audited else "could not be replayed; equal is what needs no replay",
            *auditor.compared.count.values(),
            f"{audited} of {len(auditor.blocks)} blocks" if auditor.unsure else count_text(audited, "block"),
            count_text(len(auditor.pieces), "piece"),
            time.monotonic() - begun,
        )
        return ""

    def _find(self, key: Key) -> Tensors:
        """The answer to a request."""
        if key[0] != "digest":
            return self.record.find(key)
        name = str(key[1])
        if name in self._parameters.sharded:
            return {}  # no rank has it as a whole
        mine = self._digests[name] if name in self._digests else _digest(self.record.tensor(name))
        used = self.record.used.get(name)  # a rank without microbatches computes nothing
        return {"": mine, "used": mine if used is None else _digest(used)}


class StepAudits:
    """Decides which step of a wrapped model is audited (`verify_step`)."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.wanted = context.config.verify_step
        """Number of the step, from 1; 0: none."""
        self._calls = [0]
        """See `steps`; a list, which outlives this object by a moment."""
        if self.wanted and context.world.rank == 0:
            weakref.finalize(self, _tell_unreached, self.wanted, self._calls)
        self._last: StepAudit | None = None
        self.second_begun = 0.0
        """When the second training call began (`time.monotonic`): the first one traces and plans."""

    @property
    def steps(self) -> int:
        """Number of training calls so far."""
        return self._calls[0]

    @property
    def audited(self) -> bool:
        """Whether the last step that was wanted has been replayed, and was equal."""
        return self._last is not None and self._last.equal

    def begin(
        self, bound: BoundGraph, parameters: Parameters, call: int, seed: int, *, reduce: bool
    ) -> StepAudit | None:
        """Count a call; returns its audit if it is the step. The same on all ranks.

        `reduce`: gradients are reduced in its backward, and none wait.
        """
        mode = bound.graph.signature.mode
        if not (mode.training and mode.grad):
            return None
        self._calls[0] = step = self._calls[0] + 1
        if step == 2:
            self.second_begun = time.monotonic()
        if self._last is not None and not self._last.done:
            self._last.refuse("the script has not called backward before its next call of the model")
        if step != self.wanted:
            return None
        why = self._refusal(reduce=reduce)
        if why:
            _warn(self._context, step, why)
            return None
        self._last = StepAudit(self._context, bound, parameters, step, call, seed)
        return self._last

    def _refusal(self, *, reduce: bool) -> str:
        if self._context.config.compile_stages != "off":
            return "compiled blocks (compile_stages) draw other random numbers and round otherwise than eager ones"
        if not reduce:
            return (
                "its gradients, or those of calls before it, wait for a later reduction (no_sync, delay_grad_allreduce)"
                "; audit a run in which every call reduces its own"
            )
        return ""


def _warn(context: Context, number: int, why: str) -> None:
    if context.world.rank == 0:
        log.get("RaNNCModule").warning("verify_step: step %d was not audited: %s", number, why)


def _tell_unreached(wanted: int, calls: Sequence[int]) -> None:
    """Warn, when the job or its model ends, that no step was audited."""
    if calls[0] < wanted:
        log.get("RaNNCModule").warning(
            "verify_step: step %d was not audited: the model had %d training calls", wanted, calls[0]
        )


def _numbered(values: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Tensors with values, by their places."""
    return {
        str(place): each
        for place, each in enumerate(values)
        if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, torch.nn.Parameter)
    }


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    digest = hashlib.sha256(plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"").digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


@contextlib.contextmanager
def _untouched() -> Iterator[None]:
    """Restore all generators of random numbers afterwards."""
    with kept_generators(), drawing_from(other_states()):
        try:
            yield
        finally:
            torch.clear_autocast_cache()
