"""Names in another encoding end nothing: Python reads their bytes as surrogates, which no message can hold."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from rannd.daemon.common import protocol
from rannd.daemon.common.paths import machine_id
from rannd.errors import ProtocolError
from rannd.ranks.host_name import addresses_towards, encodable, host_name, own_names
from rannd.runner.launch import probe
from rannd.runner.resources import host_list
from rannd.runtime.comm import network_interface
from rannd.runtime.comm.cache_client import holder
from rannd.runtime.failure.connections import Connections
from rannd.runtime.failure.detector import FailureDetector

LATIN = os.fsdecode("caf\u00e9".encode("latin-1"))


@pytest.fixture(autouse=True)
def latin_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: LATIN)


def test_a_name_is_text_that_can_be_written() -> None:
    assert host_name() == encodable(LATIN) == "caf\\udce9"
    assert encodable("node1") == "node1"


def test_the_host_is_named_to_other_ranks_and_hosts() -> None:
    msgspec.msgpack.encode(FailureDetector(Connections())._host)
    msgspec.msgpack.encode(probe.here(probe.Question(os.getcwd(), "", "127.0.0.1", 0, None), os.environ).host)


def test_the_machine_is_recognized() -> None:
    assert LATIN in own_names()
    assert host_list.is_local(LATIN)
    assert network_interface._is_own_name(LATIN)
    assert len(machine_id("/nonexistent")) == 16


def test_a_job_of_such_a_name_asks_for_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", LATIN)
    assert holder() == "rank 0 of job caf\\udce9"
    protocol.encode(protocol.Acquire("0" * 40, "f" * 32, 1, 5.0, who=holder()))


def test_what_cannot_be_said_is_an_error_of_the_protocol() -> None:
    with pytest.raises(ProtocolError, match=r"text that is not UTF-8: '.*udce9'"):
        protocol.encode(protocol.Stop(LATIN))


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_address_of_this_machine_on_the_way_to_another_one(address: str) -> None:
    assert addresses_towards(address) == [address]


def test_a_name_that_nobody_knows_has_no_way() -> None:
    with pytest.raises(socket.gaierror):
        addresses_towards("nowhere.invalid")
