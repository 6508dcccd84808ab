"""Compiles kinds of units with torch.compile, forward and backward, before they are used.

Each kind is a function of its own, so torch's limits of recompilations are never reached. It is compiled for the
layouts of its arguments alone (`dynamic=False`). Guards of torch.compile check every call: one that it has no code for
raises `Uncompiled` before anything has run.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rannd.device.generators import kept_generators
from rannd.device.identity import is_accelerator
from rannd.runtime.compiling.kinds import Kind

MOST_THREADS = 8
"""Maximum number of processes in which a rank compiles Triton kernels."""
BACKEND = "inductor"
_REFUSED = "fail_on_recompile"


class Uncompiled(Exception):
    """A call differs from what was compiled."""


@dataclass(frozen=True)
class Code:
    """A compiled kind."""

    kind: Kind
    function: Callable[..., Any]
    made: bool
    """Whether something was compiled, not only loaded."""
    seconds: float
    """How long that took."""

    def __call__(self, *arguments: Any) -> Any:
        """Run it; Uncompiled if there is no code for these arguments."""
        try:
            with torch.compiler.set_stance(_REFUSED):
                return self.function(*arguments)
        except RuntimeError as exc:
            if _REFUSED in str(exc):
                raise Uncompiled(_difference(str(exc))) from None
            raise


_known: dict[str, Code] = {}
"""By digest of the kind, for all models of the process."""
_looked: list[object] = []


def known(kind: Kind, device: torch.device) -> Code | None:
    """The code of a kind that this process has compiled or loaded already, if torch has not forgotten it.

    It forgets all code when a model is exported in strict mode, which tracing may do, and in torch.compiler.reset.
    """
    code = _known.get(kind.digest)
    if code is None:
        return None
    try:
        with _undisturbed(device):
            _run(code, kind, device)
    except Uncompiled:
        return None
    return code


def forgotten(device: torch.device) -> list[Kind]:
    """Kinds whose code was compiled or loaded in this process, but that torch has forgotten."""
    return [code.kind for code in _known.values() if known(code.kind, device) is None]


def compile_kind(kind: Kind, device: torch.device, threads: int) -> Code:
    """Compile a kind, or load it from torch's cache. Raises whatever torch does if it cannot be compiled."""
    from torch._dynamo import config

    if config.disable:  # torch 2.11 would run it as it is, and say nothing
        raise RuntimeError("Dynamo tracing is disabled (TORCH_COMPILE_DISABLE, torch._dynamo.config.disable)")
    options: dict[str, str | int | bool | Callable[..., Any]] = {
        "fallback_random": True,  # the same random numbers as without compilation
        "compile_threads": threads,
        "cpp_cache_precompile_headers": False,  # 150 MB for each set of flags
    }
    given = options if BACKEND == "inductor" else None
    code = _known.get(kind.digest)
    if code is None:
        function = torch.compile(kind.module.forward, fullgraph=True, dynamic=False, backend=BACKEND, options=given)
    else:
        kind, function = code.kind, code.function  # whoever has it gets what is compiled again
    before, begun = _counted(), time.monotonic()
    with _undisturbed(device):
        _run(function, kind, device)
    (compiled, loaded), (compiled_before, loaded_before) = _counted(), before
    made = compiled > compiled_before or loaded == loaded_before  # torch counts nothing if its caches are disabled
    code = _known[kind.digest] = Code(kind, function, made, time.monotonic() - begun)
    return code


def looks_at_cpu(device: torch.device) -> bool:
    """Whether torch has to find out which instructions the C++ compiler knows, before it compiles for a device."""
    return device.type == "cpu" and BACKEND == "inductor" and not _looked


def look_at_cpu() -> None:
    """Let torch find that out: it compiles a program for each set of instructions, once in a process."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    _looked.append(pick_vec_isa())


def threads_of(device: torch.device, ranks: int) -> int:
    """Processes in which each of `ranks` ranks of a node compiles; Triton's kernels alone are compiled in others."""
    if not is_accelerator(device):
        return 1
    return min(max(len(os.sched_getaffinity(0)) // max(ranks, 1), 1), MOST_THREADS)


def end_workers() -> None:
    """End the processes that torch has started to compile in."""
    from torch._inductor.async_compile import shutdown_compile_workers

    shutdown_compile_workers()


def reason(exc: BaseException) -> str:
    """Why something cannot be compiled, in one line."""
    inner = getattr(exc, "inner_exception", None)  # of torch's BackendCompilerFailed
    found = inner if isinstance(inner, BaseException) else exc
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    text = re.sub(r" - forward \(<eval_with_key>\S*\)", "", " ".join(lines[:2])) if lines else "no message"
    return f"{type(found).__name__}: {text[:200]}"


def _difference(text: str) -> str:
    """What torch's guards found, of its message: a line of reasons, if it has code for other calls."""
    found = re.search(r"^\s*- \d+/\w+: (.*?)(?:\. Guard failed on .*)?$", text, re.MULTILINE)
    return found[1] if found else "torch has forgotten its code"


def _counted() -> tuple[int, int]:
    """How many graphs inductor has compiled in this process so far, and how many it has loaded."""
    from torch._dynamo.utils import counters

    inductor, autograd = counters["inductor"], counters["aot_autograd"]
    compiled = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return int(compiled), int(inductor["fxgraph_cache_hit"] + autograd["autograd_cache_hit"])


def _run(function: Callable[..., Any], kind: Kind, device: torch.device) -> None:
    """Run forward, and backward, once; torch compiles both when they are first run."""
    arguments = [each.tensor(device) for each in kind.arguments]
    with torch.set_grad_enabled(kind.grad), kind.mode.autocasting():
        outputs = function(*arguments)
    roots = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(each) for each in roots])


@contextlib.contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Settings of torch while it compiles, and the script's random numbers and filters of warnings kept."""
    import torch._functorch.config

    with (
        torch.inference_mode(False),  # the first call may be an evaluation
        kept_generators([device]),
        warnings.catch_warnings(),
        # Memory that backward may overwrite would make a second backward (retain_graph) an error.
        torch._functorch.config.patch(donated_buffer=False),
        torch.compiler.set_stance("default"),
    ):
        warnings.simplefilter("ignore")
        yield
