"""docs/protocol.md says what the grammar says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from rannd.daemon.client.cache import BEAT_S, SLICE_S, TELL_S
from rannd.daemon.common import protocol

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
MESSAGES: list[type[msgspec.Struct]] = [*get_args(protocol.Request), *get_args(protocol.Reply)]


def row(tag: str) -> str:
    found = re.findall(rf"^\| `{tag}` \|.*$", PAGE, re.M)
    assert len(found) == 1, tag
    return found[0]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_every_message_has_a_row_with_its_fields(message: Any) -> None:
    line = row(message.__struct_config__.tag)
    if message is protocol.State:
        return
    for field in message.__struct_fields__:
        assert f"`{field}`" in line, field


@pytest.mark.parametrize("inner", [protocol.NewEntry, protocol.Difference, protocol.Miss])
def test_fields_of_inner_structs_are_named(inner: type[msgspec.Struct]) -> None:
    for field in inner.__struct_fields__:
        assert f"`{field}`" in PAGE, field


def test_versions_and_limits_are_those_of_the_code() -> None:
    assert f"`rannd/{protocol.PROTOCOL}`" in PAGE
    assert f"it is {protocol.PROTOCOL}." in PAGE
    assert f"`v{protocol.SERIES}.sock`" in PAGE
    assert re.findall(r"^\| (\d+) \| ", PAGE, re.M)[3:] == [str(each) for each in range(1, protocol.PROTOCOL + 1)]
    assert set(protocol.ADDED) == set(range(2, protocol.PROTOCOL + 1))
    mib = 1 << 20
    for text in (
        f"before it is compressed | {protocol.MAX_VALUE // mib} MiB",
        f"| a message | {protocol.MAX_MESSAGE // mib} MiB",
        f"in a message | {protocol.MAX_BATCH} |",
        f"a batch is split | {protocol.MAX_BATCH_BYTES // mib} MiB",
        f"A value above {protocol.COMPRESSED // mib} MiB",
        f"{SLICE_S:g} s at most",
        f"has not for {protocol.LEASE_S:g} s",
        f"beats every {BEAT_S:g} s, and within {TELL_S:g} s",
    ):
        assert text in " ".join(PAGE.split()), text
    for name, limit in (("wait_s", 60), ("who", 4096)):
        schema = msgspec.json.schema(protocol.Acquire)["$defs"]["Acquire"]["properties"][name]
        assert schema.get("maximum", schema.get("maxLength")) == limit
    assert "| `wait_s` | 60 |" in PAGE


def test_every_code_of_a_failure_is_explained() -> None:
    sources = "".join(file.read_text() for file in Path(protocol.__file__).parents[1].rglob("*.py"))
    codes = set(re.findall(r'Failed\(\s*"([a-z]+)"', sources)) | {"version", "protocol"}
    assert codes == set(re.findall(r"^\| `([a-z]+)` \| ", PAGE[PAGE.index("| code |") :], re.M))
