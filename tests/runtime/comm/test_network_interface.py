"""Where gloo listens: for ranks of one machine on the loopback interface."""

from __future__ import annotations

import socket

import pytest

from rannd.runtime.comm import network_interface

ALONE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
ON_TWO = {**ALONE, "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("environ", "interface"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "lo"),
        ({"MASTER_ADDR": "192.0.2.1", **ALONE}, "lo"),
        ({"MASTER_ADDR": "192.0.2.1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None),
        ({"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({}, None),
    ],
)
def test_ranks_of_one_machine_use_the_loopback_interface(
    environ: dict[str, str], interface: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_interface, "_to_others", lambda _: "")
    network_interface.choose(environ)
    assert environ.get("GLOO_SOCKET_IFNAME") == interface


def test_whose_name_is_that_of_the_loopback_address_may_have_ranks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert not network_interface.is_one_machine({"MASTER_ADDR": "localhost", **ON_TWO})
    assert network_interface.is_one_machine({"MASTER_ADDR": "localhost", **ALONE})


@pytest.mark.parametrize(("name", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("192.0.2.1", ""), ("", "")])
def test_loopback_addresses(name: str, address: str) -> None:
    assert network_interface.loopback_address(name) == address
