"""Every component of a key changes it, nothing else does."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rannd.daemon.common import keys

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
COMPONENTS = st.dictionaries(st.text(min_size=1), VALUES, min_size=1, max_size=6)

DEPLOYMENT: dict[str, Any] = {
    "graph_hash": "a" * 32,
    "inputs": [("x", "float32", (64, 512)), ("y", "int64", (64,))],
    "global_batch": 64,
    "world_size": 2,
    "topology": [(0, 0), (0, 1)],
    "device_model": "NVIDIA H200",
    "device_memory": 150 << 30,
    "backend": "nccl",
    "versions": {"python": "3.11", "torch": "2.13.0", "rannd": "0.1.0", "nccl": "2.27"},
    "flags": {"fp32 matmul": "tf32", "cudnn": True},
    "plan_items": {"partition_num": 0, "mem_margin": 0.1, "checkpointing": False, "decomposer": "ml_part"},
    "optimizer": "Adam(fp32)",
}
PROFILE: dict[str, Any] = {
    "block_hash": "b" * 32,
    "device_model": "cpu",
    "threads": 1,
    "versions": {"python": "3.11", "torch": "2.13.0", "rannd": "0.1.0"},
    "flags": {"fp32 matmul": "none", "mkldnn": True},
}
COMPILED: dict[str, Any] = {
    "block": "c" * 64,
    "rows": 8,
    "device_model": "NVIDIA H200",
    "versions": {"python": "3.11", "torch": "2.13.0", "rannd": "0.1.0", "triton": "3.6", "c++": "g++ 1"},
    "flags": {"deterministic": False, "fp32 matmul": "none"},
}
LINK: dict[str, Any] = {
    "topology": [(0, 0), (1, 0)],
    "device_model": "cpu",
    "backend": "gloo",
    "versions": {"python": "3.11", "torch": "2.13.0", "rannd": "0.1.0"},
}


def exact(value: object) -> object:
    """`value` with its types made visible: Python's == does not tell 1, 1.0 and True apart."""
    if isinstance(value, dict):
        return ("map", frozenset((name, exact(item)) for name, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(exact(item) for item in value))
    return (type(value).__name__, repr(value))


def test_types_are_told_apart() -> None:
    texts = [None, True, False, 0, 1, 1.0, -0.0, 0.0, "1", "1.0", "true", "null", "", [], [1], {}, {"1": 1}, math.inf]
    digests = {keys.make_key("trace", {"value": value}).digest for value in texts}
    assert len(digests) == len(texts)


@given(COMPONENTS, COMPONENTS)
def test_different_components_have_different_digests(one: dict[str, Any], other: dict[str, Any]) -> None:
    assume(exact(one) != exact(other))
    assert keys.make_key("trace", one).digest != keys.make_key("trace", other).digest


@given(COMPONENTS, st.randoms())
def test_order_does_not_matter(components: dict[str, Any], random: Any) -> None:
    shuffled = list(components.items())
    random.shuffle(shuffled)
    assert keys.make_key("trace", dict(shuffled)) == keys.make_key("trace", components)


@given(COMPONENTS)
def test_components_stay_readable(components: dict[str, Any]) -> None:
    key = keys.make_key("trace", components)
    assert exact({name: json.loads(text) for name, text in key.components.items()}) == exact(components)
    assert key.digest == keys.digest_of(key.kind, key.components)


def test_the_kind_is_part_of_the_key() -> None:
    assert keys.make_key("trace", {"a": 1}).digest != keys.make_key("link", {"a": 1}).digest


def test_the_digest_is_the_same_in_every_version() -> None:
    """A golden value: whoever changes the grammar must raise KEY_FORMAT."""
    assert keys.make_key("trace", {"b": [1, 2.5], "a": "ü"}).digest == "62fb20e23085fbc6d7de6f4130d60ef52420453c"


@pytest.mark.parametrize("value", [b"x", {1: 2}, object(), {"a": {None: 1}}, [b"x"], 1j, {1, 2}])
def test_what_json_would_blur_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="component 'size'"):
        keys.make_key("trace", {"size": value})


@pytest.mark.parametrize("kind", ["", "Trace", "a b", "x" * 33, "../x"])
def test_a_kind_is_a_word(kind: str) -> None:
    with pytest.raises(ValueError, match="kind"):
        keys.make_key(kind, {"a": 1})


def test_no_components_no_key() -> None:
    with pytest.raises(ValueError, match="without components"):
        keys.make_key("trace", {})


def mutations(value: Any) -> list[Any]:
    """Values near `value` that must not be taken for it."""
    if isinstance(value, bool):
        return [not value, int(value)]
    if isinstance(value, int):
        return [value + 1, value - 1, float(value), str(value)]
    if isinstance(value, float):
        return [value + 0.5, math.nextafter(value, 1e9), str(value)]
    if isinstance(value, str):
        return [value + "x", value[:-1], value.swapcase() if value.swapcase() != value else value + "y"]
    if isinstance(value, dict):
        changed = [{**value, name: other} for name, item in value.items() for other in mutations(item)]
        return [*changed, {**value, "another": "1"}]
    found: list[Any] = []
    for index, item in enumerate(value):
        found += [type(value)((*value[:index], other, *value[index + 1 :])) for other in mutations(item)]
    if len(value) > 1 and value[0] != value[-1]:
        found.append(type(value)(reversed(value)))
    return found


def test_every_kind_has_words() -> None:
    """Where a key is made, its kind is one that `rannc-cache` knows."""
    text = Path(keys.__file__).read_text()
    assert set(re.findall(r'make_key\(\s*"(\w+)"', text)) == set(keys.KINDS)


@pytest.mark.parametrize(
    ("build", "arguments"),
    [
        (keys.deployment_key, DEPLOYMENT),
        (keys.profile_key, PROFILE),
        (keys.link_key, LINK),
        (keys.compiled_key, COMPILED),
    ],
    ids=["deployment", "profile", "link", "compiled"],
)
def test_every_changed_component_changes_the_key(build: Callable[..., keys.Key], arguments: dict[str, Any]) -> None:
    digests = {build(**arguments).digest}
    count = 1
    for name, value in arguments.items():
        for other in mutations(value):
            changed = {**arguments, name: other}
            if name == "world_size":
                if not isinstance(other, int):
                    continue
                changed["topology"] = [(0, device) for device in range(other)]
            digests.add(build(**changed).digest)
            count += 1
    assert count > 20
    assert len(digests) == count


def test_ranks_and_batch_of_a_deployment_are_separate() -> None:
    """Shapes are global: the same rows on more ranks are another key."""
    four = {**DEPLOYMENT, "world_size": 4, "topology": [(0, 0), (0, 1), (1, 0), (1, 1)]}
    spread = {**four, "topology": [(0, 0), (1, 0), (2, 0), (3, 0)]}
    assert len({keys.deployment_key(**each).digest for each in (DEPLOYMENT, four, spread)}) == 3


@pytest.mark.parametrize("missing", sorted(keys.REQUIRED_VERSIONS))
def test_a_forgotten_version_is_an_error(missing: str) -> None:
    versions = {name: text for name, text in PROFILE["versions"].items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        keys.profile_key(**{**PROFILE, "versions": versions})


def test_a_forgotten_component_is_an_error() -> None:
    for name in DEPLOYMENT:
        with pytest.raises(TypeError, match=name):
            keys.deployment_key(**{other: value for other, value in DEPLOYMENT.items() if other != name})


def test_topology_and_world_size_agree() -> None:
    with pytest.raises(ValueError, match="3 ranks"):
        keys.deployment_key(**{**DEPLOYMENT, "world_size": 3})


def test_the_summary_names_the_essentials() -> None:
    key = keys.deployment_key(**DEPLOYMENT)
    assert keys.summary(key.kind, key.components) == "graph aaaaaaaa, ranks 2, batch 64, on NVIDIA H200, over nccl"
