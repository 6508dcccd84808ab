"""Keys of cache entries: a key contains everything that can change the value.

A key is a kind and named components. Each component is stored as canonical JSON, readable and exact about types:
``1``, ``1.0``, ``"1"`` and ``true`` are four different texts. The digest is BLAKE2b-160 of::

    ["rannd-key", 1, kind, [[name, text], ...]]        as JSON in ASCII without spaces, sorted by name

Mappings inside a component are sorted by name as well, sequences keep their order. An incomplete key would silently
return another model's plan: every builder below takes each component by name, without defaults, and
tests/daemon/common/test_keys.py changes each one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import msgspec

from rannd.daemon.common.printable import plain

Scalar: TypeAlias = bool | int | float | str | None
Component: TypeAlias = Scalar | Sequence["Component"] | Mapping[str, "Component"]

KEY_FORMAT = 1
REQUIRED_VERSIONS = frozenset({"python", "torch", "rannd"})
_KIND = re.compile(r"[a-z][a-z_]{0,31}")


class Key(msgspec.Struct, frozen=True):
    """Key of a cached value."""

    kind: str
    """Kind of the value: ``deployment``, ``profile``, ``trace``, ``links``, ``limit``, ``hooks``, ``compiled``,
    ``measured``, ``learned``, ``runtime``."""
    digest: str
    """40 hex digits."""
    components: dict[str, str]
    """Canonical JSON text of each component, by name."""

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def short(self) -> str:
        """The first digits of the digest, for display."""
        return self.digest[:12]


def make_key(kind: str, components: Mapping[str, Component]) -> Key:
    """Return the key of `kind` with these components.

    Raises:
        ValueError: `kind` is not a lower-case word, or there are no components.
        TypeError: A component contains other types than None, bool, int, float, str, sequences and mappings with str
            keys.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"the kind of a key is a lower-case word of at most 32 letters, not {kind!r}")
    if not components:
        raise ValueError(f"a key of kind {kind!r} without components would be shared by everything")
    texts = {name: _canonical(value, name) for name, value in sorted(components.items())}
    return Key(kind, digest_of(kind, texts), texts)


def digest_of(kind: str, texts: Mapping[str, str]) -> str:
    """Return the digest of a kind and the canonical texts of its components."""
    grammar = ["rannd-key", KEY_FORMAT, kind, sorted(texts.items())]
    text = json.dumps(grammar, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode("ascii"), digest_size=20).hexdigest()


def deployment_key(
    *,
    graph_hash: str,
    inputs: Sequence[tuple[str, str, tuple[int, ...]]],
    global_batch: int,
    world_size: int,
    topology: Sequence[tuple[int, int]],
    device_model: str,
    device_memory: int,
    backend: str,
    versions: Mapping[str, str],
    flags: Mapping[str, Component],
    plan_items: Mapping[str, Scalar],
    optimizer: str,
) -> Key:
    """Return the key of a deployment.

    Args:
        graph_hash: Hash of the traced graph.
        inputs: Name, dtype and global shape of each input, in the order of the call.
        global_batch: Rows of all ranks' mini-batches together.
        world_size: Number of ranks.
        topology: Node and device ordinal of each slot.
        device_model: Name of the devices, as the driver reports it.
        device_memory: Bytes per device that a plan may use.
        backend: ``nccl`` or ``gloo``.
        versions: At least python, torch and rannd.
        flags: Settings of torch that decide which kernels run.
        plan_items: Every configuration item that can change a plan, with its value.
        optimizer: Text that determines the optimizer's memory.

    Raises:
        ValueError: A required version is missing, or topology and world size do not agree.
    """
    if len(topology) != world_size:
        raise ValueError(f"a topology of {len(topology)} slots does not describe {world_size} ranks")
    return make_key(
        "deployment",
        {
            "graph": graph_hash,
            "inputs": [[name, dtype, list(shape)] for name, dtype, shape in inputs],
            "global_batch": global_batch,
            "world_size": world_size,
            "topology": [list(slot) for slot in topology],
            "device_model": device_model,
            "device_memory": device_memory,
            "backend": backend,
            "optimizer": optimizer,
            **_versions(versions),
            **_flags(flags),
            **{f"plan.{name}": value for name, value in plan_items.items()},
        },
    )


def profile_key(
    *, block_hash: str, device_model: str, threads: int, versions: Mapping[str, str], flags: Mapping[str, Component]
) -> Key:
    """Return the key of a block's measured times. `flags`: as for `deployment_key`.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key(
        "profile",
        {
            "block": block_hash,
            "device_model": device_model,
            "threads": threads,
            **_versions(versions),
            **_flags(flags),
        },
    )


def compiled_key(
    *, block: str, rows: int, device_model: str, versions: Mapping[str, str], flags: Mapping[str, Component]
) -> Key:
    """Return the key of a compiled kind of block.

    Args:
        block: Hash of the block's operators and of the layouts of their arguments.
        rows: Rows of a piece.
        device_model: Name of the device, and of a CPU its number of threads.
        versions: At least python, torch and rannd; also Triton and the C++ compiler.
        flags: As for `deployment_key`.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key(
        "compiled",
        {
            "block": block,
            "rows": rows,
            "device_model": device_model,
            **_versions(versions),
            **_flags(flags),
        },
    )


def limit_key(deployment: Key) -> Key:
    """Return the key of the memory limit of a plan, which was lowered after `deployment` ran out of memory."""
    return make_key("limit", {"deployment": deployment.digest})


def measured_key(deployment: str) -> Key:
    """Return the key of what steps of a plan took; `deployment`: digest of the plan's key."""
    return make_key("measured", {"deployment": deployment})


def trace_key(components: Mapping[str, Component]) -> Key:
    """Return the key of a traced graph: the fingerprint of the model and its inputs before tracing."""
    return make_key("trace", components)


def hooks_key(*, tracer: str, versions: Mapping[str, str]) -> Key:
    """Return the key for which hooks of the tracer (`tracer`: digest of its sources) a version of torch calls.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key("hooks", {"tracer": tracer, **_versions(versions)})


def link_key(
    *, topology: Sequence[tuple[int, int]], device_model: str, backend: str, versions: Mapping[str, str]
) -> Key:
    """Return the key of measured link speeds between the slots of `topology`, which no flag of torch changes.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key(
        "links",
        {
            "topology": [list(slot) for slot in topology],
            "device_model": device_model,
            "backend": backend,
            **_versions(versions),
        },
    )


def learned_key(
    *,
    graph_hash: str,
    device_model: str,
    threads: int,
    backend: str,
    versions: Mapping[str, str],
    flags: Mapping[str, Component],
    code: str,
) -> Key:
    """Return the key of what steps say of the costs of a graph.

    Args:
        graph_hash: Hash of the canonical task graph.
        device_model: As for `deployment_key`, like `backend`, `versions` and `flags`.
        threads: Threads of a rank on a CPU; 0 on an accelerator.
        backend: See `device_model`.
        versions: See `device_model`.
        flags: See `device_model`.
        code: What compiled the stages; '' if nothing did.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key(
        "learned",
        {
            "graph": graph_hash,
            "device_model": device_model,
            "threads": threads,
            "backend": backend,
            "code": code,
            **_versions(versions),
            **_flags(flags),
        },
    )


def runtime_key(*, device_model: str, threads: int, backend: str, ranks: int, versions: Mapping[str, str]) -> Key:
    """Return the key of what the runtime itself takes of a machine's hosts; `ranks`: most of them on one host.

    The others are as for `learned_key`.

    Raises:
        ValueError: A required version is missing.
    """
    return make_key(
        "runtime",
        {
            "device_model": device_model,
            "threads": threads,
            "backend": backend,
            "ranks": ranks,
            **_versions(versions),
        },
    )


def summary(kind: str, components: Mapping[str, str]) -> str:
    """Summarize an entry in one line, for display."""
    found: list[str] = []
    for name, label, length in _ESSENTIALS.get(kind, ()):
        if name in components:
            text = components[name]
            found.append(f"{label} {(text[1:-1] if text.startswith(chr(34)) else text)[:length]}")
    if not found:
        found = [f"{name} {text[:16]}" for name, text in sorted(components.items())[:3]]
    return plain(", ".join(found))  # texts of an imported entry may contain anything


_ESSENTIALS: Mapping[str, Sequence[tuple[str, str, int]]] = {
    "deployment": (
        ("graph", "graph", 8),
        ("world_size", "ranks", 8),
        ("global_batch", "batch", 10),
        ("device_model", "on", 32),
        ("backend", "over", 8),
    ),
    "profile": (("block", "block", 8), ("device_model", "on", 32), ("threads", "threads", 8)),
    "trace": (("model", "of", 48), ("call", "for", 72)),
    "learned": (("graph", "graph", 8), ("device_model", "on", 32), ("backend", "over", 8)),
    "runtime": (("ranks", "ranks", 8), ("device_model", "on", 32), ("backend", "over", 8)),
    "limit": (("deployment", "after out of memory in", 12),),
    "measured": (("deployment", "steps of", 12),),
    "hooks": (("version.torch", "of torch", 24),),
    "compiled": (
        ("block", "block", 8),
        ("rows", "rows", 8),
        ("device_model", "on", 32),
        ("version.torch", "torch", 16),
    ),
    "links": (("topology", "slots", 24), ("device_model", "on", 32), ("backend", "over", 8)),
}


KINDS = tuple(sorted(_ESSENTIALS))
"""Kinds of entries."""


def _versions(versions: Mapping[str, str]) -> dict[str, str]:
    missing = sorted(REQUIRED_VERSIONS - versions.keys())
    if missing:
        raise ValueError(
            f"the versions of a key lack {', '.join(missing)}; it has {', '.join(sorted(versions)) or 'none'}"
        )
    return {f"version.{name}": text for name, text in versions.items()}


def _flags(flags: Mapping[str, Component]) -> dict[str, Component]:
    return {f"flag.{name}": value for name, value in flags.items()}


def _canonical(value: Component, name: str) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a component's name is a text, not {name!r}")
    return json.dumps(_plain(value, name), ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def _plain(value: Component, name: str) -> Component:
    """Convert sequences to lists; refuse what JSON would make ambiguous, such as mapping keys that are not str."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if any(not isinstance(inner, str) for inner in value):
            raise TypeError(f"the names inside component {name!r} are not all texts: {sorted(map(repr, value))}")
        return {inner: _plain(item, name) for inner, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, name) for item in value]
    raise TypeError(
        f"component {name!r} contains a {type(value).__name__}: {value!r}; give numbers, texts, lists, mappings"
    )
