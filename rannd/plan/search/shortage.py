"""The error where no plan fits: which memory would do, with what is configured and with what else would help."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from rannd.errors import DoesNotFitError
from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.blocks import Block
from rannd.plan.plan_options import PlanOptions
from rannd.plan.search.stages import Need
from rannd.plan.stage_costs.stage_parts import stage_name
from rannd.units import amount, amounts_apart

_GIB = 1024**3
_MOST_NAMED = 3
"""Maximum number of opaque parts of the model that an error names."""


class Remedy(msgspec.Struct, frozen=True):
    """A setting with which less memory would do."""

    setting: str
    """Such as 'zero_stage=3'."""
    bytes: float
    """Memory of each device that some plan needs then."""


def remedies(need: Need, tried: Iterable[tuple[str, Need | None]]) -> list[Remedy]:
    """Return the settings that need less memory than `need`, which is that of what is configured.

    Args:
        need: As configured.
        tried: Other settings, with ``{}`` for the ZeRO stage, and the least that plans with them need. Combinations
            are told only if they need less than what is before them.
    """
    found: list[Remedy] = []
    for setting, each in tried:
        before = [other.bytes for other in found] if " and " in setting else []
        if each is not None and each.bytes < min([need.bytes, *before]):
            found.append(Remedy(setting.format(each.zero), each.bytes))
    return found


def does_not_fit(
    graph: TaskGraph,
    blocks: Sequence[Block],
    need: Need,
    memory_bytes: int,
    options: PlanOptions,
    world: int,
    others: Sequence[Remedy],
) -> DoesNotFitError:
    """Return the error with the memory that would suffice, as configured (`need`) and with `others`."""
    least = math.ceil(need.bytes)
    block = max(range(need.start, need.end), key=lambda at: need.of_block[at - need.start])
    needed, limit = amounts_apart(least, memory_bytes)
    included = ["recomputing"]
    included += [f"ZeRO {need.zero}"] if need.zero else []
    included += need.offload.settings
    more = "".join(f" With {each.setting}, {_upward(each.bytes)} would do." for each in others)
    return DoesNotFitError(
        f"no plan fits {world} device{'s' if world > 1 else ''}: the best one needs {needed} of a device, "
        f"{_listed(included)} included; the limit is {limit}. mem_limit_gb={_limit_gb(least, options):g} (with "
        f"mem_margin={options.mem_margin:g}) would allow it. Its largest stage is {stage_name(need.start, need.end)}; "
        f"in it block {stage_name(block, block + 1)} ({modules_of(graph, blocks[block])}) needs most.{more} Use "
        "devices with more memory, more ranks, a smaller batch, or an optimizer with less state "
        f"(opt_param_factor={options.opt_param_factor:g}){opaque_code(graph)}",
        needed=least,
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _limit_gb(least: float, options: PlanOptions) -> float:
    """mem_limit_gb with which a plan may use `least` bytes; rounded up, so that the number in the message suffices."""
    return math.ceil(least / (1 - options.mem_margin) / _GIB * 1000 + 1e-6) / 1000


def _upward(count: float) -> str:
    """Format bytes as `amount` does, but never less than they are."""
    size = next((size for size in (2**30, 2**20, 2**10) if count >= size), 1)
    digits = 10.0 ** (3 - math.floor(math.log10(max(count / size, 1.0))))
    return amount(math.ceil(count / size * digits) / digits * size, 5)


def modules_of(graph: TaskGraph, block: Block) -> str:
    """Return the first modules of a block, for messages."""
    modules = list(dict.fromkeys(graph.ops[op].module or graph.ops[op].name for op in block.ops))
    return ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")


def opaque_code(graph: TaskGraph) -> str:
    """Return a sentence for errors that names code which cannot be cut because it runs as one operator, or ''."""
    code = list(dict.fromkeys(op.opaque for op in graph.ops if op.opaque))
    if not code:
        return ""
    some = ", ".join(code[:_MOST_NAMED]) + (f" and {len(code) - _MOST_NAMED} more" if len(code) > _MOST_NAMED else "")
    return (
        f". Nothing inside {some} can be split over stages: that code cannot be traced and runs as one operator. The "
        "log lines 'Tracing:' say why, and where: move what cannot be traced into a small submodule of its own"
    )
