"""The tracing front-end: converts a module to a graph with the first method that works.

1. non-strict export with a dynamic batch dimension; branches on the call's tensors and constants are taken as in this
   call (`rannd.graph.branches.data_dependent`);
2. strict export, if the first fixes the batch size;
3. non-strict export with the submodules that prevent it as leaves (`leaf_recorder.py`): those that the traceback
   names, otherwise those found by bisecting the module tree;
4. export for the present batch size only;
5. the whole model as one leaf: always correct, but it cannot be cut.

Every step adds a line to the record of the traced model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rannd.device.identity import is_usable
from rannd.errors import TraceError
from rannd.graph.branches.branch_selection import MOST_CHANCES, MoreOperators, NotASelection, select
from rannd.graph.branches.data_dependent import Undecidable
from rannd.graph.call.call_errors import numbers_by_row
from rannd.graph.call.signature import Signature
from rannd.graph.call.unread import Unread
from rannd.graph.fx.leaf_op import LeafTable
from rannd.graph.fx.traced import Traced
from rannd.graph.modules.autograd_functions import function_path
from rannd.graph.modules.bisection import (
    ancestors,
    halve,
    has_backward_hooks,
    is_called,
    outermost,
    packed_calls,
    twins,
    within,
)
from rannd.graph.modules.foreign_rng import unchanged
from rannd.graph.modules.methods import called_methods, method_path, part_of
from rannd.graph.modules.source_location import Offence, SourceLocation, described, in_words, of_exception
from rannd.graph.tracing.autocast_types import settle_types
from rannd.graph.tracing.batch_dim import closed_batch, holes, lines
from rannd.graph.tracing.export import Notes, Shown, TracedCall, example_inputs, export, quiet, shown, traced_of
from rannd.graph.tracing.hook_proofs import failing
from rannd.graph.tracing.leaf_recorder import NotALeaf, record, undone
from rannd.graph.tracing.on_device import home_of, running_on
from rannd.graph.tracing.unsound_exports import unshown, written_constant, written_later

LARGEST_EXAMPLE = 256
"""Maximum batch size to trace with."""

MOST_BY_CHANCE = 2
"""Maximum number of tensors that may have as many rows as the first batch without carrying samples."""

MOST_ATTEMPTS = 64
"""Maximum number of searches for leaves."""

LARGE_SHARE = 0.2
"""Strict export is tried before leaves hold more than this fraction of the parameters."""


@dataclass(frozen=True)
class _Attempt:
    """Result of one export: a traced model, or a problem and its location."""

    traced: Traced | None = None
    problem: BaseException | None = None
    place: SourceLocation | None = None
    notes: Notes | None = None
    table: LeafTable | None = None

    @property
    def good(self) -> bool:
        return self.problem is None


class _ClosedBatch(Exception):
    """The exported program is valid for some batch sizes only."""


def trace(
    model: nn.Module,
    signature: Signature,
    leaves: list[torch.Tensor],
    device: torch.device,
    assumed: Sequence[bool] | None = None,
    opaque: Sequence[str] = (),
) -> tuple[Traced, Signature]:
    """Trace `model` as on `device` for calls with tensors like `leaves` (one per tensor of the signature).

    Data-dependent branches are taken as for `leaves`; if these have no rows, `assumed` has the outcomes on another rank
    (`rannd.graph.branches.data_dependent`). The modules at `opaque` run as single operators, whatever their code is.

    Returns the traced model and the signature of the calls that it is valid for: the given one, or one with a fixed
    number of rows. Raises TraceError if the model itself fails, returns no tensor, or has to run on a device that this
    process does not have.
    """
    with _counting():
        traced, signature = _FrontEnd(model, signature, leaves, device, assumed, opaque).run()
    settle_types(traced, signature, device)
    return traced, signature


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Leaves inference mode, whose tensors do not count their changes, as torch.export requires."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class _FrontEnd:
    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        leaves: list[torch.Tensor],
        device: torch.device,
        assumed: Sequence[bool] | None,
        opaque: Sequence[str],
    ) -> None:
        self._model = model
        self._signature = signature
        self._leaves = leaves
        self._device = device
        self._assumed = assumed
        self._opaque = opaque
        empty = signature.rows(leaves) == 0
        self._sample = TracedCall(example_inputs(signature, leaves) if empty else leaves, assumed if empty else None)
        self._record: list[str] = []
        # Strict export reads the code of the stand-ins, which note that they are read, instead of calling it.
        self._strict_tried = any(type(value) is Unread for _, value in signature.constants)
        self._offended = False
        self._functions_tried: set[str] = set()

    def _for(self, signature: Signature) -> _FrontEnd:
        """The same for calls with another signature."""
        return _FrontEnd(self._model, signature, self._leaves, self._device, self._assumed, self._opaque)

    def _export(self, examples: tuple[torch.Tensor, ...], **options: Any) -> Any:
        """Export the model for examples, see `rannd.graph.tracing.export.export`."""
        return export(self._model, self._signature, examples, self._sample, device=self._device, **options)

    def run(self) -> tuple[Traced, Signature]:
        """Try the methods in turn."""
        hooked = [name for name, module in self._model.named_modules() if has_backward_hooks(module)]
        if lost := failing():
            self._note(
                f"torch {torch.__version__} does not call these hooks of the tracer: {', '.join(lost)}; graphs could "
                "silently be wrong, so the whole model runs as one operator. Please report this"
            )
            return self._whole()
        for name in self._opaque:
            self._note(f"{described(self._model, name)} cannot be shown by one graph: runs as one operator")
        for name in hooked:
            self._note(f"{described(self._model, name)} has backward hooks: runs as one operator")
        paths = outermost([*self._opaque, *hooked])
        first = attempt = self._open(paths)
        if not attempt.good:
            problem = self._problem(attempt)
            if problem is not None and (fixed := self._more_rows(problem)) is not None:
                return fixed
            if problem is not None:
                raise problem from problem.__cause__
        for _ in range(MOST_ATTEMPTS):
            if attempt.good:
                return self._done(attempt)
            self._note(f"export failed: {self._why(attempt)}")
            self._offended |= isinstance(attempt.problem, Offence) and not attempt.problem.strict_keeps
            if isinstance(attempt.problem, _ClosedBatch) and (strict := self._strict()) is not None:
                return self._done(strict)
            if (function := self._function(attempt)) is not None:
                other = self._open([*paths, function])
                if not isinstance(other.problem, NotALeaf) or other.problem.path != function:
                    self._note(f"{described(self._model, function)} runs as one operator")
                    paths, attempt = [*paths, function], other
                    continue
                self._note(f"{described(self._model, function)} cannot run as one operator: {other.problem}")
            if self._signature.numbers:
                raise TraceError(f"numbers cannot be inputs of the graph: {self._why(attempt)}")
            found = self._culprits(attempt, paths)
            if "" in found or self._share({*paths, *found}) > LARGE_SHARE:
                better = self._method(attempt, paths)
                if better is not None:
                    path, attempt = better
                    self._note(f"{described(self._model, path)} runs as one operator")
                    paths = [*paths, path]
                    continue
            if "" in found:
                break
            if self._share({*paths, *found}) > LARGE_SHARE:
                if (strict := self._strict()) is not None:
                    return self._done(strict)
                if isinstance(attempt.problem, _ClosedBatch):
                    break  # a graph for this batch size can be cut, large leaves cannot
            for name in found:
                self._note(f"{described(self._model, name)} runs as one operator")
            paths = outermost([*paths, *found])
            attempt = self._open(paths)
        if (strict := self._strict()) is not None:
            return self._done(strict)
        if not isinstance(first.problem, Offence) and "" not in paths and (fixed := self._fixed(paths)) is not None:
            return fixed
        return self._whole(attempt)

    # -- methods ----------------------------------------------------------------------------------------------

    def _open(self, paths: Sequence[str], strict: bool = False) -> _Attempt:
        """Export with the modules at `paths` as leaves; the batch is dynamic unless the signature fixes it."""
        notes = Notes()
        table: LeafTable | None = None
        try:
            if paths:
                with self._running():
                    table = record(self._model, paths, self._runs())
            examples = example_inputs(self._signature, self._leaves)
            program = self._export(examples, strict=strict, table=table, notes=notes)
            closed = closed_batch(program, self._signature) if self._signature.fixed_rows is None else None
            if closed is not None:
                name, low, high = closed
                if not (low < high and self._same_beyond(program, high, strict, table)):
                    sizes = f"{low} to {high}" if low < high else str(low)
                    raise _ClosedBatch(
                        f"the batch dimension of {name} is fixed by the model's code to {sizes} (it uses the size as a "
                        "Python number, or compares it)"
                    )
            closed_sizes = holes(program, self._signature) if self._signature.fixed_rows is None else ()
            if self._signature.rows(self._leaves) in closed_sizes:
                raise _ClosedBatch(
                    f"the model's code runs differently for a batch of {self._signature.rows(self._leaves)} rows than "
                    "for others (it compares the size)"
                )
        except (TraceError, KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except Offence as exc:
            return _Attempt(problem=exc, place=exc.place)
        except NotALeaf as exc:
            place = SourceLocation(ancestors(exc.path), "")
            return _Attempt(problem=exc, place=place)
        except _ClosedBatch as exc:
            return _Attempt(problem=exc)
        except Exception as exc:
            return _Attempt(problem=exc, place=of_exception(self._model, exc), notes=notes)
        try:
            found = shown(self._model, program, notes, self._device)
            if notes.chances:
                found = self._select(found, notes, examples, table)
            traced = dataclasses.replace(traced_of(self._model, found, self._device), leaves=table, holes=closed_sizes)
        except (Undecidable, NotASelection) as exc:
            around = (exc.module, *ancestors(exc.module)) if exc.module else ("",)
            return _Attempt(problem=exc, place=SourceLocation(around, ""))
        hidden = unshown(traced) or written_constant(traced)
        if hidden is not None:
            around = (hidden.path, *ancestors(hidden.path)) if hidden.path else ("",)
            return _Attempt(problem=hidden, place=SourceLocation(around, ""))
        broken = written_later(traced)
        if broken is not None:
            return _Attempt(problem=broken, place=SourceLocation(ancestors(broken.path), ""))
        return _Attempt(traced, notes=notes, table=table)

    def _select(self, base: Shown, notes: Notes, examples: tuple[torch.Tensor, ...], table: LeafTable | None) -> Shown:
        """Build the graph with both sides of random branches; `base` has the outcome False for all. NotASelection."""
        count = notes.chances
        module = base.chances[0].meta.get("module", "")
        if count > MOST_CHANCES:
            raise NotASelection(f"is one of {count}, which are too many to trace each (at most {MOST_CHANCES})", module)

        def way(chance: Callable[[int], bool]) -> Shown:
            seen = Notes()
            try:
                program = self._export(examples, table=table, notes=seen, chance=chance)
            except (Exception, Offence) as exc:
                raise NotASelection(f"cannot be traced with the other outcome: {in_words(exc)}", module) from exc
            if seen.decided != notes.decided:
                raise NotASelection("changes the outcome of data-dependent branches", module)
            return shown(self._model, program, seen, self._device)

        taken = way(lambda _: True)
        try:
            select(base, False, [way(partial(operator.eq, number)) for number in range(count)], taken)
        except MoreOperators:
            select(taken, True, [way(partial(operator.ne, number)) for number in range(count)], base)
            base = taken
        self._note(f"{count} branches on random numbers: both sides are computed in every call, and one is selected")
        return base

    def _strict(self) -> _Attempt | None:
        """Try strict export, once, unless it would silently drop what non-strict export refused."""
        if self._strict_tried or self._offended or self._opaque:
            return None
        self._strict_tried = True
        attempt = self._open((), strict=True)
        if not attempt.good:
            self._note(f"strict export failed as well: {self._why(attempt)}")
            return None
        self._note("exported in strict mode")
        return attempt

    def _fixed(self, paths: Sequence[str]) -> tuple[Traced, Signature] | None:
        """Export for the present number of rows only."""
        rows = self._signature.rows(self._leaves)
        if rows == 0:
            return None
        signature = dataclasses.replace(self._signature, fixed_rows=rows)
        other = self._for(signature)
        attempt = other._open(paths)
        if not attempt.good:
            self._note(f"export for {rows} rows failed as well: {self._why(attempt)}")
            return None
        self._note(f"exported for {rows} rows; each other batch size needs another graph")
        return self._done(attempt)[0], signature

    def _more_rows(self, problem: TraceError) -> tuple[Traced, Signature] | None:
        """Trace with the present number of rows if the model fails only for the few rows of an example.

        The graph may still be valid for any number of rows, if a tensor has the size of the batch only by chance.
        """
        rows = self._signature.rows(self._leaves)
        fixed = dataclasses.replace(self._signature, fixed_rows=rows)
        if self._signature.fixed_rows is not None or rows == 0 or not self._runs_with(fixed, [2]):
            return None  # the model itself fails
        if numbers_by_row(self._signature, rows):
            return None  # a list has one number per sample, so the graph would be valid for this mini-batch only
        few = self._signature.rows(example_inputs(self._signature, self._leaves))
        carrying = [number for number, spec in enumerate(self._signature.tensors) if spec.batch]
        for count in range(1, min(len(carrying), MOST_BY_CHANCE + 1)):
            for numbers in itertools.combinations(reversed(carrying), count):
                signature = self._signature.whole(numbers, rows)
                if self._runs_with(signature, [2, rows + 1]):
                    other = self._for(signature)
                    names = ", ".join(self._signature.tensors[number].name for number in sorted(numbers))
                    other._note(
                        f"{names} also has size {rows} in dimension 0, but carries no samples: for {few} rows {problem}"
                    )
                    traced, signature = other.run()
                    return dataclasses.replace(traced, whole=tuple(sorted(numbers))), signature
        other = self._for(fixed)
        other._note(f"for {few} rows {problem}; traced for {rows} rows, each other batch size needs another graph")
        return other.run()

    def _runs_with(self, signature: Signature, sizes: Iterable[int]) -> bool:
        """Whether the model runs under another signature with batch sizes of at least each of `sizes`."""
        other = self._for(signature)
        with self._running():
            try:
                with undone(self._model):
                    for size in sizes:
                        other._run(example_inputs(signature, self._leaves, size))
            except Exception:
                return False
        return True

    def _whole(self, attempt: _Attempt | None = None) -> tuple[Traced, Signature]:
        """Trace the whole model as one leaf."""
        whole = self._open(("",))
        if not whole.good:
            first = f"{self._line(attempt)}: {self._why(attempt)}" if attempt is not None else f": {self._record[-1]}"
            raise TraceError(
                f"{described(self._model, '')} cannot be traced{first}; it cannot run as one operator either: "
                f"{self._why(whole)}"
            ) from (attempt.problem if attempt is not None else None)
        if attempt is None:
            return self._done(whole)
        why = self._why(attempt).rstrip(".")
        with packed_calls(self._model) as packed:
            if any(isinstance(each, nn.RNNBase) for each in self._model.modules()):
                self._runs_with(self._signature, [2])
        advice = (
            f"forward calls {packed[0]} with a PackedSequence: put packing, {packed[0]} and unpacking into a separate"
            if packed and packed[0]
            else "Move that code into a separate"
        )
        self._note(
            f"the whole model runs as one operator, and cannot be cut: {why}. {advice} submodule, so that the rest can "
            "be partitioned"
        )
        return self._done(whole)

    def _done(self, attempt: _Attempt) -> tuple[Traced, Signature]:
        notes = attempt.notes or Notes()
        for name in notes.dropped:
            self._note(f"{name} of the output cannot be returned by ranks and becomes None")
        assert attempt.traced is not None
        changes = tuple(sorted(notes.changes))
        return dataclasses.replace(attempt.traced, changes=changes, record=tuple(self._record)), self._signature

    # -- which code prevents the export -----------------------------------------------------------------------

    def _function(self, attempt: _Attempt) -> str | None:
        """Path of the custom Function that prevents the export, unless it was already tried as an operator."""
        if not isinstance(attempt.problem, Offence) or attempt.problem.function is None:
            return None
        path = function_path(attempt.problem.function)
        if path in self._functions_tried:
            return None
        self._functions_tried.add(path)
        return path

    def _culprits(self, attempt: _Attempt, paths: Sequence[str]) -> list[str]:
        """Modules that have to become leaves; [''] if the model's own forward prevents the export."""
        if attempt.place is not None and (attempt.place.exact or attempt.place.modules != ("",)):
            inner = next(
                name
                for name in attempt.place.modules
                if not name or (not within(name, paths) and is_called(self._model.get_submodule(name)))
            )
            return twins(self._model, inner, paths)
        return halve(self._model, "", list(paths), lambda parts: self._open(parts).good)

    def _method(self, attempt: _Attempt, paths: Sequence[str]) -> tuple[str, _Attempt] | None:
        """Find a method whose use as a leaf, instead of its module, removes the failure; and the attempt with it."""
        if attempt.place is None:
            return None
        inner = next(name for name in attempt.place.modules if not within(name, paths) or not name)
        try:
            with self._running(), undone(self._model):
                names = called_methods(self._model.get_submodule(inner), self._runs()[0][1])
        except Exception:
            return None  # the model itself fails, which `_problem` reports
        for name in names:
            path = method_path(inner, name)
            other = self._open([*paths, path])
            if other.good or (not isinstance(other.problem, NotALeaf) and self._why(other) != self._why(attempt)):
                return path, other
        return None

    # -- helpers ----------------------------------------------------------------------------------------------

    def _runs(self) -> list[tuple[int, Callable[[], Any]]]:
        """(number of rows, function that runs the model with them) for three batch sizes; two runs if it is fixed."""
        if self._signature.fixed_rows is not None:
            sizes = [example_inputs(self._signature, self._leaves)] * 2
        else:
            sizes = [example_inputs(self._signature, self._leaves)]
            for more in (1, 2):
                last = self._signature.rows(sizes[-1])
                sizes.append(example_inputs(self._signature, self._leaves, last + more))
        return [(self._signature.rows(examples), partial(self._run, examples)) for examples in sizes]

    def _running(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model can be run, on the job's device; TraceError if that is not possible.

        Without autocast it computes the same types of values elsewhere.
        """
        why = next((line for line in self._record if "failed" in line), "")
        return running_on(self._device, self._model, why, required=bool(self._signature.mode.autocast))

    def _run(self, examples: Sequence[torch.Tensor]) -> Any:
        home = home_of(self._model)
        if home is not None:
            examples = [each.detach().to(home).requires_grad_(each.requires_grad) for each in examples]
        args, kwargs = self._signature.unflatten(examples, traced=True)
        with unchanged(self._model), quiet():  # the script does not make this call, so it says nothing
            return self._model(*args, **kwargs)

    def _problem(self, attempt: _Attempt) -> TraceError | None:
        """Run the model without tracing, if there is its device; the error to raise if it fails as well."""
        if not is_usable(self._device):
            return None
        examples = example_inputs(self._signature, self._leaves)
        if attempt.notes is not None and attempt.notes.decided:
            # Branches had the outcomes of the whole mini-batch, which may differ from those of the first rows.
            examples = tuple(
                tensor.detach().clone().requires_grad_(spec.requires_grad)
                for spec, tensor in zip(self._signature.tensors, self._sample.tensors, strict=True)
            )
        with self._running():
            try:
                with undone(self._model):
                    self._run(examples)
            except Exception as exc:
                place = of_exception(self._model, exc)
                ran, call = _shapes(examples), _shapes(self._leaves)
                others = (
                    f" (tried with tensors of the shapes {ran}; those of the call have {call})" if ran != call else ""
                )
                where = described(self._model, place.modules[0])
                told = TraceError(f"{where} fails{place.line}: {in_words(exc)}{others}")
                told.__cause__ = exc
                return told
        return None

    def _same_beyond(self, program: Any, high: int, strict: bool, table: LeafTable | None) -> bool:
        """Whether a program that is valid for at most `high` rows is the same for more (torch chose among kernels)."""
        if high > LARGEST_EXAMPLE:
            return False
        examples = example_inputs(self._signature, self._leaves, high + 1)
        try:
            other = self._export(examples, strict=strict, table=table)
        except Exception:
            return False
        return lines(program.graph) == lines(other.graph)

    def _why(self, attempt: _Attempt) -> str:
        problem = attempt.problem
        assert problem is not None
        if attempt.place is None:
            return in_words(problem) if not isinstance(problem, _ClosedBatch) else str(problem)
        where = described(self._model, attempt.place.modules[0])
        return f"{where}{attempt.place.line}: {in_words(problem) if not isinstance(problem, NotALeaf) else problem}"

    def _line(self, attempt: _Attempt) -> str:
        return attempt.place.line if attempt.place is not None else ""

    def _share(self, paths: Iterable[str]) -> float:
        """Fraction of the model's parameters in the given modules."""
        inside = {id(p): p.numel() for name in paths for p in part_of(self._model, name).parameters()}
        return sum(inside.values()) / max(sum(p.numel() for p in self._model.parameters()), 1)

    def _note(self, line: str) -> None:
        self._record.append(line)


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join("x".join(map(str, each.shape)) or "()" for each in tensors)
