"""Describes a cluster to plan for: its devices and links, read from a TOML file. The cluster need not be available.

conf/clusters holds clusters that can be given by name; docs/clusters.md explains how times are computed from these
numbers. Rates are data-sheet rates, multiplied by the fractions of them that real models reach (``[efficiency]``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import msgspec

import rannd
from rannd.config.item import nearest, toml_text
from rannd.config.tomlfile import TomlFile
from rannd.errors import ConfigError

FOLDER = Path(rannd.__file__).parent / "conf" / "clusters"
"""Directory of the clusters with names; in the source tree rannd/conf is a link to conf."""
_GIB, _GB = 1024**3, 1e9


class Tflops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak rates of a device in 10**12 floating-point operations per second, per dtype."""

    float64: float
    float32: float
    """Without TF32, which is torch's default."""
    float16: float
    bfloat16: float


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of the peak rates that the operators of a model reach."""

    flops: float = 0.6
    """Fraction of [tflops]; large matrix products reach more, small ones less."""
    memory: float = 0.75
    """Fraction of memory_gb_per_s."""
    links: float = 0.8
    """Fraction of the links' gb_per_s."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connection between two devices: rates for one device in one direction while all devices of its node send."""

    gb_per_s: float
    latency_us: float


class Links(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connections of a device."""

    inside: Link
    """To a device of the same node."""
    between: Link | None = None
    """To a device of another node; None: the cluster has one node."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of equal nodes with equal devices. 1 GB is 10**9 bytes, 1 GiB is 2**30 bytes."""

    device: str
    """Model of the devices, as reported by their driver."""
    devices_per_node: int
    memory_gib: float
    """Memory of one device, as reported to a program."""
    memory_gb_per_s: float
    """Peak memory bandwidth of a device, reads and writes combined."""
    op_latency_us: float
    """Launch overhead of an operator."""
    tflops: Tflops
    link: Links
    description: str = ""
    efficiency: Efficiency = Efficiency()
    name: str = ""
    """File name without suffix; not a key of the file."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one device in bytes."""
        return int(self.memory_gib * _GIB)

    @property
    def memory_bytes_per_us(self) -> float:
        """Achieved memory bandwidth of a device in bytes per microsecond."""
        return self.memory_gb_per_s * self.efficiency.memory * _GB / 1e6

    def flops_per_us(self, dtype: str) -> float:
        """Achieved floating-point operations per microsecond of a device for a dtype such as 'float32' or 'complex64'.

        8-bit floating-point dtypes count as bfloat16, integer and boolean dtypes as float32.
        """
        name = {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype, dtype)
        if name.startswith("float8"):
            name = "bfloat16"
        rate: float = getattr(self.tflops, name, self.tflops.float32)
        return rate * self.efficiency.flops * 1e12 / 1e6

    def link_bytes_per_us(self, link: Link) -> float:
        """Achieved bandwidth of `link` in bytes per microsecond."""
        return link.gb_per_s * self.efficiency.links * _GB / 1e6

    def places(self, count: int) -> tuple[tuple[int, int], ...]:
        """(node, local device) of each of `count` devices; the last node may be used partially.

        Raises:
            ConfigError: `count` devices need several nodes, but the cluster has no links between nodes.
        """
        if count > self.devices_per_node and self.link.between is None:
            raise ConfigError(
                f"{count} devices are {-(-count // self.devices_per_node)} nodes of cluster {self.name}, which has "
                f"{self.devices_per_node} devices per node and no [link.between]; plan for at most "
                f"{self.devices_per_node} devices, or copy its file and add [link.between]"
            )
        return tuple(divmod(number, self.devices_per_node) for number in range(count))


def cluster_names() -> list[str]:
    """The cluster names that `cluster_file` accepts, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def cluster_file(text: str) -> Path:
    """The file of a cluster. `text` is a path (with a slash, or ending in .toml) or a name.

    Raises:
        ConfigError: no cluster has this name; the message lists the names.
    """
    if os.sep in text or text.endswith(".toml"):
        return Path(text).expanduser()
    names = cluster_names()
    if text not in names:
        raise ConfigError(f"no cluster is named {text!r}; there are {', '.join(names)}, or give the path of a file")
    return FOLDER / f"{text}.toml"


def load_cluster(text: str) -> Cluster:
    """Reads the cluster of a name or path.

    Raises:
        ConfigError: the file does not exist, or a key or value in it is invalid; the message has file and line.
    """
    file = cluster_file(text)
    toml = TomlFile(file)
    # The name says where a plan's costs come from, so the file must not choose another.
    if "name" in toml.data:
        raise ConfigError(f"{toml.where('name')}: name is what the file is called; remove the key")
    _check(Cluster, toml.data, toml, ())
    cluster = msgspec.convert({**toml.data, "name": file.stem}, Cluster)
    return cluster


#: Minimum values; all other numbers must be above 0.
_LEAST = {"latency_us": 0.0, "op_latency_us": 0.0}


def _check(table: type[msgspec.Struct], data: dict[str, Any], toml: TomlFile, path: tuple[str, ...]) -> None:
    """Raises ConfigError if `data`, the table at `path` of the file, does not match the type `table`."""
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
    """Raises ConfigError if a value is not of type `kind`, or is out of range."""
    if kind is str:
        wanted = "a string"
        right = isinstance(value, str)
    elif kind is int:
        wanted = "a whole number, 1 or more"
        right = type(value) is int and 1 <= value <= 1_000_000
    else:
        # type() instead of isinstance(): to Python a bool is an int, to the user it is not.
        number = type(value) in (int, float) and abs(value) <= 1e12
        wanted = "a number above 0 and at most 1" if share else "a number above 0"
        right = number and value > 0 and (not share or value <= 1)
        if key in _LEAST:
            wanted, right = f"a number, {_LEAST[key]:g} or more", number and value >= _LEAST[key]
    if not right:
        raise ConfigError(f"{where}: {told} = {toml_text(value)}, but {told} must be {wanted}")


def _needed(table: type[msgspec.Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(table) if field.required)
