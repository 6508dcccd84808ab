"""Cluster files: those that come along, and what is said of wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rannd.config.cluster import FOLDER, Efficiency, cluster_names, load_cluster
from rannd.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
GOOD = """\
device = "Box"
devices_per_node = 2
memory_gib = 8
memory_gb_per_s = 100.0
op_latency_us = 0

[tflops]
float64 = 1.0
float32 = 2.0
float16 = 4.0
bfloat16 = 4.0

[link.inside]
gb_per_s = 10.0
latency_us = 5.0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    return path


def test_those_that_come_along_are_read_by_name() -> None:
    assert {"a100x8", "cpu", "v100x8", "workstation"} <= set(cluster_names())
    assert cluster_names() == sorted(path.stem for path in FOLDER.glob("*.toml"))
    assert (ROOT / "conf" / "clusters").resolve() == FOLDER.resolve()
    for name in cluster_names():
        cluster = load_cluster(name)
        assert (cluster.name, bool(cluster.description)) == (name, True)
        assert cluster.tflops.float32 >= cluster.tflops.float64
        assert cluster.tflops.float16 >= cluster.tflops.float32
    assert [load_cluster(name).memory_bytes >> 30 for name in ("v100x8", "a100x8", "h200x8")] == [31, 79, 139]
    assert load_cluster("h200x8").memory_gb_per_s > load_cluster("h100x8").memory_gb_per_s


def test_units_and_defaults(file: Path) -> None:
    cluster = load_cluster(str(file))
    assert (cluster.name, cluster.memory_bytes) == ("mine", 8 << 30)
    assert cluster.efficiency.flops == 0.6
    assert cluster.flops_per_us("float16") == pytest.approx(4e6 * 0.6)
    assert cluster.flops_per_us("complex64") == cluster.flops_per_us("float32") == cluster.flops_per_us("")
    assert cluster.flops_per_us("float8_e4m3fn") == cluster.flops_per_us("bfloat16")
    assert cluster.memory_bytes_per_us == pytest.approx(100e3 * 0.75)
    assert cluster.link_bytes_per_us(cluster.link.inside) == pytest.approx(10e3 * 0.8)


def test_places_fill_node_by_node(file: Path) -> None:
    assert load_cluster("a100x8").places(10)[6:] == ((0, 6), (0, 7), (1, 0), (1, 1))
    assert load_cluster(str(file)).places(2) == ((0, 0), (0, 1))
    with pytest.raises(ConfigError, match=r"3 devices are 2 nodes of cluster mine.*link\.between"):
        load_cluster(str(file)).places(3)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib", "memory_gb", r"mine.toml:3: no key of a cluster is named memory_gb; the nearest is memory_gib"),
        ("float64", "flaot64", r"mine.toml:8: no key of a cluster is named tflops.flaot64; the nearest is tflops.flo"),
        ("[link.inside]", "[link.indise]", r":13: no key .* is named link.indise; the nearest is link.inside"),
        ("devices_per_node = 2", "", r"mine.toml: it has no devices_per_node; every cluster needs device, "),
        ("float32 = 2.0", "", r"mine.toml:7: \[tflops\] has no float32"),
        ("devices_per_node = 2", "devices_per_node = 2.5", r":2: devices_per_node = 2.5, .* must be a whole number"),
        ("devices_per_node = 2", "devices_per_node = true", r"devices_per_node = true, but"),
        ("memory_gib = 8", "memory_gib = 0", r":3: memory_gib = 0, but memory_gib must be a number above 0"),
        ("memory_gib = 8", "memory_gib = nan", r"memory_gib = nan, but"),
        ("memory_gib = 8", "memory_gib = 1e300", r"memory_gib = 1e\+300, but"),
        ("memory_gib = 8", f"memory_gib = 1{'0' * 400}", r"memory_gib = 10+, but"),
        ("latency_us = 5.0", "latency_us = -1", r":15: link.inside.latency_us = -1, but .* a number, 0 or more"),
        ('device = "Box"', "device = 3", r":1: device = 3, but device must be a string"),
        ('device = "Box"', 'device = "Box"\nname = "a100x8"', r":2: name is what the file is called"),
        ('device = "Box"', 'device = "Box"\nefficiency = 1', r":2: efficiency = 1, but efficiency is a table"),
        ('device = "Box"', 'device = "Box"\nefficiency.flops = 1.5', r"efficiency.flops = 1.5, .* at most 1"),
        ('device = "Box"', "device = ", r"mine.toml:1: not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        load_cluster(str(file))


def test_a_name_that_is_not_known_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no cluster is named 'a100'; there are a100x8, cpu, .*, or give the path"):
        load_cluster("a100")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_cluster(str(tmp_path / "none.toml"))


def test_the_example_of_the_manual_is_right(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    file = tmp_path / "desk.toml"
    file.write_text(text)
    cluster = load_cluster(str(file))
    assert cluster.efficiency == Efficiency()  # "these are the defaults"
    for name in cluster_names():
        assert f"| `{name}` |" in page
