"""Compute the fingerprint of a model and a call before tracing: equal fingerprints, equal graphs.

A traced graph can be used in another process if everything that tracing may have read is the same there. A fingerprint
records all of it, in components that a person can compare:

=========  =====================================================================================================
versions   of Python, torch, rannd, and of every distribution whose code was found, with its requirements
tracer     the sources of rannd that determine a trace
model      the class of the model
modules    class, attributes and hooks of every module, in order; shared modules by their first name
tensors    parameters and buffers: type, shape, device type, flags, sharing; not their values
code       functions and classes, by bytecode; the files of user code, by content
globals    the values of all globals that user code reads
call       structure, types, shapes and constants of the arguments; not the batch size
mode       train or eval, gradients, autocast, type of the job's device, defaults and global settings of torch
=========  =====================================================================================================

If something that a trace may depend on cannot be read, the result is `Unseen` with the reason, and the model has to be
traced.

A fingerprint does not include, and cannot notice:

- Behaviour of libraries beyond their version and the bytecode of their classes: C extensions, a library that reads
  files, environment variables or the hardware, values that a program assigns to a library's globals. User functions
  and classes in the namespaces of torch, and in the modules around the library classes of the model, are included.
- Library files that were edited in place without a new version, unless they contain one of the model's classes.
- User methods that only a library calls, by a name that occurs neither in user code nor in a base class.
- Kernels that a program registers for torch's operators, classes that it registers with abstract base classes,
  torch's private configuration modules.
- Attributes of tensors such as `grad`; strides of the arguments (a `Signature` has none); annotations.
- The iteration order of a set of strings, which differs between processes.
- Names that code reaches through frames or the garbage collector.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.utils._device import DeviceContext

from rannd.device.identity import has_accelerator
from rannd.graph.call.signature import Signature
from rannd.graph.call.unread import Unread
from rannd.graph.fingerprint.code_inspector import Inspector
from rannd.graph.fingerprint.object_reader import attributes_of, modules_of
from rannd.graph.fingerprint.provenance import PYTHON, file_digest, requirements_of, version_of
from rannd.graph.fingerprint.state_rules import global_hooks, modes_around, switches
from rannd.graph.fingerprint.value_writer import Hidden
from rannd.sources import TRACING, digest_of


@dataclass(frozen=True)
class Fingerprint:
    """Everything that a trace depends on; `components` maps the names in this module's table to text."""

    components: Mapping[str, str]


@dataclass(frozen=True)
class Unseen:
    """Result without a fingerprint: `reason` says what a trace may depend on and cannot be read."""

    reason: str


def fingerprint(model: nn.Module, signature: Signature, device: torch.device) -> Fingerprint | Unseen:
    """Compute the fingerprint of tracing `model`, in its present state, for calls with `signature` on `device`.

    Runs no user code and has no side effects. Equal in every process where the trace would be the same, independent of
    weights and batch size; takes milliseconds. Reads at most 16 MiB of tensors that are neither parameters nor buffers
    of the model.
    """
    try:
        mode = _mode(signature, device)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return Fingerprint({**_components(model, signature), "mode": mode})
    except Hidden as exc:
        return Unseen(str(exc))
    except RecursionError:
        return Unseen("values that the model refers to are nested too deeply to be read (recursion limit)")


def _components(model: nn.Module, signature: Signature) -> dict[str, str]:
    modules = list(modules_of(model, again=True))
    first: dict[int, str] = {}
    for name, module in modules:
        first.setdefault(id(module), name)
    tensors = list(_tensors(modules, first))
    owners: dict[int, str] = {}
    for name, tensor, _ in tensors:
        owners.setdefault(id(tensor), name)
    inspector = Inspector(owners, first)

    lines = []
    for name, module in modules:
        if first[id(module)] == name:
            lines.append(f"{name!r} {inspector.write_module(module, name)}")
        else:
            lines.append(f"{name!r} is {first[id(module)]!r}")
    for name, flags, hook in global_hooks():
        lines.append(f"{name} {flags} {inspector.write(hook, name, 'a hook of all modules')}")
    described = list(_describe_tensors(inspector, tensors, owners))
    call = _call(inspector, signature)
    inspector.finish()
    inspector.changed_libraries()
    inspector.finish()
    files = sorted({file_digest(os.path.abspath(path)) for path in inspector.files})
    kind = type(model)
    return {
        "versions": _versions(inspector.owners),
        "tracer": digest_of(TRACING),
        "model": f"{kind.__module__}.{kind.__qualname__}",
        "modules": _digest(lines),
        "tensors": _digest(described),
        "code": _digest([*inspector.code, *files]),
        "globals": _digest(inspector.globals),
        "call": call,
    }


def _digest(lines: list[str]) -> str:
    text = "\n".join(lines)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tensors(
    modules: list[tuple[str, nn.Module]], first: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor | None, str]]:
    """Yield (name, tensor or None, 'parameter' or 'buffer') for the parameters and buffers of all modules."""
    for name, module in modules:
        if first[id(module)] != name:
            continue
        prefix = f"{name}." if name else ""
        state = attributes_of(module)
        for kind, key in (("parameter", "_parameters"), ("buffer", "_buffers")):
            for inner, tensor in state.get(key, {}).items():
                yield prefix + inner, tensor, kind


def _describe_tensors(
    inspector: Inspector, tensors: list[tuple[str, torch.Tensor | None, str]], owners: Mapping[int, str]
) -> Iterator[str]:
    storages: dict[int, str] = {}
    for name, tensor, kind in tensors:
        if tensor is None:
            yield f"{name!r} {kind} None"
            continue
        owner = owners[id(tensor)]
        if owner != name:
            yield f"{name!r} {kind} is {owner!r}"
            continue
        text = inspector.write_tensor(tensor, name, f"{kind} {name}")
        memory = storages.setdefault(tensor.untyped_storage()._cdata, name)
        shared = f" in the memory of {memory!r} at {tensor.storage_offset()}" if memory != name else ""
        yield f"{name!r} {kind} {text}{shared}"


def _call(inspector: Inspector, signature: Signature) -> str:
    """Describe a call in words, followed by a digest of all its details."""
    lines = [_structure(inspector, signature.spec)]
    for spec in signature.tensors:
        shape = ", ".join(map(str, spec.shape))
        lines.append(f"{spec.name!r} {spec.dtype} ({shape}) {spec.batch:d}{spec.requires_grad:d}")
    lines.append(f"{signature.positions} {signature.fixed_rows} {signature.numbers}")
    for position, value in signature.constants:
        if type(value) is Unread:
            lines.append(f"{position} unread {value.kind.__module__}.{value.kind.__qualname__}")
        else:
            lines.append(f"{position} {inspector.write(value, f'argument {position}', f'argument {position}')}")
    return f"{signature.describe()} {_digest(lines)[:32]}"


def _structure(inspector: Inspector, spec: pytree.TreeSpec) -> str:
    """Serialize a TreeSpec, including the flatten and unflatten functions of its container classes."""
    if spec.type is None:
        return "*"
    where = "the structure of the arguments"
    parts = [inspector.write(spec.type, where, where), inspector.write(spec._context, where, where)]
    node = pytree.SUPPORTED_NODES.get(spec.type)
    if node is not None:
        parts += [inspector.write(function, where, where) for function in (node.flatten_fn, node.unflatten_fn)]
    inner = ",".join(_structure(inspector, child) for child in spec._children)
    return f"({' '.join(parts)} [{inner}])"


def _mode(signature: Signature, device: torch.device) -> str:
    """Every setting that influences which operators are traced. Hidden inside of function or dispatch modes."""
    for mode in modes_around():
        if type(mode) is not DeviceContext:
            raise Hidden(f"the call runs inside a {type(mode).__module__}.{type(mode).__qualname__}")
    found: dict[str, Any] = {
        "training": signature.mode.training,
        "grad": signature.mode.grad,
        "autocast": signature.mode.autocast,
        "dropout": signature.mode.dropout,
        "on": device.type,
        **switches(),
        "built": [torch.backends.mkldnn.is_available(), torch.backends.opt_einsum.is_available()],
        "cuda": [has_accelerator(), torch.accelerator.device_count()],
        "optimized": sys.flags.optimize,
    }
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _versions(owners: set[str]) -> str:
    names = {"rannd", "torch"}
    for owner in sorted(owners - {PYTHON}):
        for distribution in owner.split("+"):
            names |= requirements_of(distribution)
    names |= requirements_of("torch")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return ", ".join([python, f"torch {torch.__version__}", *(f"{name} {version_of(name)}" for name in sorted(names))])
