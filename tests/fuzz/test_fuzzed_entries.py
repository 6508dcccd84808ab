"""Deployments, profiles, checkpoints, exports and messages that somebody else wrote: errors of ours, and nothing else.

Each is changed as data, sealed again with the right checksums, and read.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickletools
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz.mutation import CANARY, Mutator
from fuzz.watched import Found
from plan_graphs import chain
from plan_instances import deploy

from rannd.daemon.common import keys, protocol
from rannd.daemon.common.compression import pack
from rannd.errors import CheckpointError, RanndError
from rannd.plan import deployment
from rannd.plan.plan_text import show
from rannd.profile import graph_profile
from rannd.profile.points import Measured, Point
from rannd.runner.cache import export_file
from rannd.runtime.checkpoint.manifest import MANIFEST, Manifest, manifest
from rannd.runtime.storage.checkpoint_file import FileFacts
from rannd.runtime.storage.dcp_metadata import METADATA, read_index
from rannd.runtime.storage.saved_value import read_value

ROUNDS = 1000
GROWTH = 2**30
SECONDS = 60
ROUND_COUNTS = [ROUNDS, pytest.param(20 * ROUNDS, marks=pytest.mark.full)]


def attempt(found: Found, read: Callable[[], object]) -> None:
    """Read something; errors of rannd's are right, all others are raised."""
    with found.watched():
        try:
            read()
        except RanndError:
            found.refused += 1


def judge(found: Found, what: str, rounds: int) -> None:
    assert found.violations == []
    assert found.runs > rounds // 2
    assert found.refused
    assert found.grown < GROWTH
    assert found.seconds < SECONDS
    print(f"{found.runs} mutated {what}, {found.refused} refused; slowest {found.seconds:.2f} s")


def packed(data: Any) -> bytes | None:
    """As msgpack; None where that cannot hold it."""
    try:
        return msgspec.msgpack.encode(data)
    except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
        return None


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_deployments(rounds: int) -> None:
    plan = deploy(chain(10), 4, rows=16, partition_num=2, pipeline_num=2)
    plain = msgspec.msgpack.decode(deployment.encode(plan))
    mutator, found = Mutator(1), Found()

    def read(data: bytes) -> None:
        show(deployment.decode(data))

    for _ in range(rounds):
        if (data := packed(mutator.mutated(plain))) is not None:
            attempt(found, lambda data=data: read(data))  # type: ignore[misc]
    judge(found, "deployments", rounds)


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_profiles(rounds: int) -> None:
    blocks = {name: Measured((Point(1, 9.0, 2.0, 1.0, 5.0), Point(4, 20.0, 8.0, 1.0, 9.0))) for name in ("aa", "bb")}
    profile = graph_profile.GraphProfile(graph_profile.FORMAT, "cpu", "0.1", "2.13", {}, blocks)
    plain = msgspec.msgpack.decode(graph_profile.encode(profile))
    mutator, found = Mutator(2), Found()

    def read(data: bytes) -> None:
        for block in graph_profile.decode(data).blocks.values():
            block.cost(4).forward_us.at(4)

    for _ in range(rounds):
        if (data := packed(mutator.mutated(plain))) is not None:
            attempt(found, lambda data=data: read(data))  # type: ignore[misc]
    judge(found, "profiles", rounds)


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_exports(rounds: int) -> None:
    key = keys.make_key("trace", {"number": 1})
    value = pack(bytes(protocol.COMPRESSED + 1))
    entry = export_file.Exported(key.digest, key.kind, key.components, "0.1.0", 1e9, value.size, value.data)
    frames = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(each))
        for each in (export_file.Header(1, "0.1.0", 1e9), entry, export_file.End(1))
    ]
    mutator, found = Mutator(3), Found()
    for _ in range(rounds):
        content = [packed(frame) for frame in mutator.mutated(frames) if frame is not None]
        if None in content:
            continue
        framed = [len(c).to_bytes(4, "big") + export_file._checksum(c) + c for c in content if c is not None]
        opened = io.BytesIO(export_file.MAGIC + b"".join(framed))
        attempt(found, lambda opened=opened: list(export_file.read(opened)))  # type: ignore[misc]
    judge(found, "exports", rounds)


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_messages(rounds: int) -> None:
    key = keys.make_key("trace", {"number": 1})
    requests = [
        protocol.Get((key.digest,)),
        protocol.Put((protocol.NewEntry(key.digest, key.kind, key.components, b"value", 0),), "0.1.0"),
        protocol.Why(key.kind, key.components),
    ]
    mutator, found = Mutator(4), Found()
    for number in range(rounds):
        frames = protocol.encode(requests[number % len(requests)])
        data = packed(mutator.mutated(msgspec.msgpack.decode(frames[-1])))
        if data is not None:
            attempt(found, lambda f=[*frames[:-1], data]: protocol.decode_request(f))  # type: ignore[misc]
    judge(found, "messages", rounds)


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_manifests(rounds: int, tmp_path: Path) -> None:
    plain = json.loads(manifest("model", 2, 7, {"rank0.pt": FileFacts(100, 7), "rank1.pt": FileFacts(9, 1)}).sealed())
    mutator, found = Mutator(5), Found()
    for _ in range(rounds):
        changed = mutator.mutated(plain)
        try:
            if isinstance(changed, dict):
                changed["digest"] = ""
                changed["digest"] = hashlib.sha256(msgspec.json.encode(changed)).hexdigest()[:16]
            (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(changed))
        except (OverflowError, RecursionError, UnicodeEncodeError, TypeError):
            continue
        attempt(found, lambda: Manifest.read(tmp_path))
    judge(found, "manifests", rounds)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_indexes(rounds: int, tmp_path: Path) -> None:
    """The index of a checkpoint is a pickle."""
    dcp.save({"weight": torch.randn(4, 3), "bias": torch.zeros(2)}, checkpoint_id=tmp_path / "sound", no_dist=True)
    change, found = PickleChanger((tmp_path / "sound" / METADATA).read_bytes(), 6), Found()
    for _ in range(rounds):
        (tmp_path / METADATA).write_bytes(change.changed())
        attempt(found, lambda: read_index(tmp_path))
    judge(found, "indexes", rounds)


@pytest.mark.parametrize("rounds", ROUND_COUNTS)
def test_saved_values(rounds: int) -> None:
    """Values and tensors in a checkpoint are archives with a pickle each."""
    state = {"a": [1, 0.5, None, (2, "x")], (1, 2): {"b": b"y"}, "t": torch.randn(4, 3), "u": torch.ones(2).double()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as opened:
        members = {name: opened.read(name) for name in opened.namelist()}
    described = next(name for name in members if name.endswith("/data.pkl"))
    change, found = PickleChanger(members[described], 7), Found()
    for _ in range(rounds):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as opened:
            for name, data in members.items():
                opened.writestr(name, change.changed() if name == described else data)

        def read(made: io.BytesIO = made) -> None:
            try:
                read_value(made, 0, len(made.getvalue()))
            except ValueError as exc:
                raise CheckpointError(str(exc)) from exc

        attempt(found, read)
    judge(found, "saved values", rounds)


class PickleChanger:
    """Opcodes of a pickle are exchanged, repeated and left out, its names replaced."""

    def __init__(self, data: bytes, seed: int) -> None:
        places = [place or 0 for _, _, place in pickletools.genops(data)]
        self._opcodes = [data[begin:end] for begin, end in zip(places, [*places[1:], len(data)], strict=True)]
        self._chance = random.Random(seed)
        names = [("os", "system"), (CANARY, "run"), ("builtins", "eval")]
        calls = [f"c{module}\n{name}\n".encode() for module, name in names]
        self._extra = [*calls, b"R", b"b", b"\x81", b"2", b"0", b"(", b"t", b"\x8a\x041234", b"h\x01"]
        self._extra += [b"r\xff\xff\xff\x7f"]

    def changed(self) -> bytes:
        """The pickle with one to four changes."""
        changed, chance = list(self._opcodes), self._chance
        for _ in range(chance.randint(1, 4)):
            place = chance.randrange(len(changed))
            match chance.randrange(5):
                case 0:
                    changed[place] = chance.choice(self._opcodes)
                case 1:
                    del changed[place]
                case 2:
                    changed.insert(place, chance.choice(self._extra))
                case 3:
                    changed[place:place] = changed[place : place + chance.randint(1, 20)]
                case _:
                    text = chance.choice([CANARY, "os", "system", "../../x", ""]).encode()
                    changed[place] = b"X" + len(text).to_bytes(4, "little") + text
        return b"".join(changed)
