"""A cluster: devices and links to plan for that need not be there, read from a TOML file.

conf/clusters holds some, found by name; docs/clusters.md says how times are made of these numbers. Rates are those
of the data sheet, by which the parts of them that real models reach (``[efficiency]``) are multiplied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import msgspec

from rannd.config.item import nearest, toml_text
from rannd.config.tomlfile import TomlFile
from rannd.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "clusters"
"""The clusters that have names; in the source tree it is a link to conf/clusters."""
_GIB, _GB = 1024**3, 1e9


class Tflops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak rates of a device in 10**12 floating-point operations per second, by the type they compute in."""

    float64: float
    float32: float
    """As torch computes by default: without TF32."""
    float16: float
    bfloat16: float


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What part of a peak rate operators of a model reach."""

    flops: float = 0.6
    """Of [tflops]: large matrix products reach more, small ones less."""
    memory: float = 0.75
    """Of memory_gb_per_s."""
    links: float = 0.8
    """Of gb_per_s of the links."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connection between two devices, for one of them, in one direction, while all devices of the node send."""

    gb_per_s: float
    latency_us: float


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Connections of a device."""

    inside: Link
    """To a device of its own node."""
    between: Link | None = None
    """To a device of another node; None: there is one node only."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Equal nodes of equal devices. 1 GB is 10**9 bytes, 1 GiB 2**30."""

    device: str
    """The model of the devices, as their driver names it."""
    devices_per_node: int
    memory_gib: float
    """Of one device, as a program sees it."""
    memory_gb_per_s: float
    """Peak bandwidth of a device's memory, reads and writes together."""
    op_latency_us: float
    """What starting an operator costs beyond its work."""
    tflops: Tflops
    link: Links
    description: str = ""
    efficiency: Efficiency = Efficiency()
    name: str = ""
    """What its file is called; no key of the file."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.memory_gib * _GIB)

    @property
    def memory_bytes_per_us(self) -> float:
        """What a device moves between its memory and itself."""
        return self.memory_gb_per_s * self.efficiency.memory * _GB / 1e6

    def flops_per_us(self, dtype: str) -> float:
        """Floating-point operations of a device in a microsecond, for a type such as 'float32' or 'complex64'.

        Types of 8 bits count as bfloat16, whole numbers and truth values as float32.
        """
        name = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype, dtype)
        if name.startswith("float8"):
            name = "bfloat16"
        rate: float = getattr(self.tflops, name, self.tflops.float32)
        return rate * self.efficiency.flops * 1e12 / 1e6

    def link_bytes_per_us(self, link: Link) -> float:
        """What one of `link` carries."""
        return link.gb_per_s * self.efficiency.links * _GB / 1e6

    def places(self, count: int) -> tuple[tuple[int, int], ...]:
        """(node, device on it) of `count` devices; the last node may be used in part.

        Raises:
            ConfigError: `count` devices need several nodes, and nothing is said of links between them.
        """
        if count > self.devices_per_node and self.link.between is None:
            raise ConfigError(
                f"{count} devices are {-(-count // self.devices_per_node)} nodes of cluster {self.name}, which has "
                f"{self.devices_per_node} devices a node and no [link.between]; plan for {self.devices_per_node} at "
                "most, or copy its file and add [link.between]"
            )
        return tuple(divmod(number, self.devices_per_node) for number in range(count))


def cluster_names() -> list[str]:
    """Names that `cluster_file` knows, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def cluster_file(text: str) -> Path:
    """The file of a cluster: `text` is a path (with a slash, or ending in .toml) or a name.

    Raises:
        ConfigError: no cluster has this name; the message lists those there are.
    """
    if os.sep in text or text.endswith(".toml"):
        return Path(text).expanduser()
    names = cluster_names()
    if text not in names:
        raise ConfigError(f"no cluster is named {text!r}; there are {', '.join(names)}, or give the path of a file")
    return FOLDER / f"{text}.toml"


def load_cluster(text: str) -> Cluster:
    """The cluster of a name or path.

    Raises:
        ConfigError: there is no such file, or a key or value in it is wrong; with file and line.
    """
    file = cluster_file(text)
    toml = TomlFile(file)
    # The name tells where a plan's costs come from, so it is not for the file to choose.
    if "name" in toml.data:
        raise ConfigError(f"{toml.where('name')}: name is what the file is called; leave the key away")
    _check(Cluster, toml.data, toml, ())
    cluster = msgspec.convert({**toml.data, "name": file.stem}, Cluster)
    return cluster


#: The least a number may be; those not named have to be above 0.
_LEAST = {"latency_us": 0.0, "op_latency_us": 0.0}


def _check(table: type[msgspec.Struct], data: dict[str, Any], toml: TomlFile, path: tuple[str, ...]) -> None:
    """ConfigError where `data`, the table at `path` of the file, is none of the type `table`."""
    fields = {field.name: field for field in msgspec.structs.fields(table) if field.name != "name"}
    for key, value in data.items():
        where, told = toml.where(*path, key), ".".join((*path, key))
        if key not in fields:
            known = ".".join((*path, nearest(key, fields)))
            raise ConfigError(f"{where}: no key of a cluster is named {told}; the nearest is {known}")
        types = [fields[key].type, *get_args(fields[key].type)]
        inner = next((t for t in types if isinstance(t, type) and issubclass(t, msgspec.Struct)), None)
        if inner is not None:
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {told} = {toml_text(value)}, but {told} is a table; write [{told}]")
            _check(inner, value, toml, (*path, key))
        else:
            _check_value(fields[key].type, key, value, where, told, share=table is Efficiency)
    for name, field in fields.items():
        if field.required and name not in data:
            section = f"[{'.'.join(path)}]" if path else "it"
            raise ConfigError(f"{toml.where(*path)}: {section} has no {name}; every cluster needs {_needed(table)}")


def _check_value(kind: object, key: str, value: Any, where: str, told: str, *, share: bool) -> None:
    """ConfigError where a plain value has another type than `kind`, or is out of range."""
    if kind is str:
        wanted = "a string"
        right = isinstance(value, str)
    elif kind is int:
        wanted = "a whole number, 1 or more"
        right = type(value) is int and 1 <= value <= 1_000_000
    else:
        # type() and not isinstance: a bool is an int for Python, not for a user.
        number = type(value) in (int, float) and abs(value) <= 1e12
        wanted = "a number above 0 and at most 1" if share else "a number above 0"
        right = number and value > 0 and (not share or value <= 1)
        if key in _LEAST:
            wanted, right = f"a number, {_LEAST[key]:g} or more", number and value >= _LEAST[key]
    if not right:
        raise ConfigError(f"{where}: {told} = {toml_text(value)}, but {told} wants {wanted}")


def _needed(table: type[msgspec.Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(table) if field.required)
