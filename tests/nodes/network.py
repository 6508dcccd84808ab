"""Machines of a small network, played by namespaces: each with its own name, address, /dev/shm, home and daemon.

A node is a process that sleeps in namespaces of its own (network, names, mounts); commands enter them. All nodes hang
on one switch, a bridge in a namespace of its own, so nothing of this machine's own network is touched, and nothing is
left when the processes have ended. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

import fork_server
import psutil

from rannd.runner.watch.processes import die_with_parent

NETWORK = "10.213.47"
#: Enters a node as ssh would: with a login's few variables, in the home directory.
AGENT = """#!/bin/sh
# {agent} [options] HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host="$1"; shift
pid="$(cat {nodes}/"$host".pid 2>/dev/null)" || {{ echo "agent: no route to host $host" >&2; exit 255; }}
for node in $$ "$pid"; do
    nsenter -t $node --net ip link show dev eth0 2>/dev/null | grep -q LOWER_UP && continue
    echo "agent: connect to host $host: No route to host" >&2; exit 255
done
exec env -i HOME="$HOME" XDG_RUNTIME_DIR="$HOME/run" PATH=/usr/local/bin:/usr/bin:/bin SHELL=/bin/sh \\
    nsenter -t "$pid" --net --uts --mount --wd="$HOME" sh -c "$*"
"""


def reason_for_none() -> str:
    """Why there can be no nodes here, '' where they can be made."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"{tool} is not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "add", "x", "type", "bridge"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def _sleeping(namespaces: list[str], *commands: str) -> subprocess.Popen[bytes]:
    """A process that sleeps in new namespaces, after some commands in them; it ends with this one at the latest."""
    script = " && ".join([*commands, "echo ready", "exec sleep infinity"])
    own_pid = os.getpid()
    started = subprocess.Popen(
        ["unshare", *namespaces, "sh", "-c", script],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: die_with_parent(own_pid, signal.SIGKILL),
    )
    assert started.stdout is not None
    with started.stdout:
        if started.stdout.readline() != b"ready\n":
            started.kill()
            started.wait()
            raise OSError(f"namespaces could not be made: {script}")
    return started


class Node:
    """One machine."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network = network
        self.name = name
        self.address = address
        self.disk = network.base / f"disk-{name}"
        for folder in ("", "run", "tmp"):
            (self.disk / folder).mkdir(mode=0o700)
        self.hosts = network.base / f"hosts-{name}"
        """Its /etc/hosts."""
        self.hosts.write_text(network.hosts_of(name))
        home, hosts = shlex.quote(str(network.home)), shlex.quote(str(self.hosts))
        self._sleeper = _sleeping(
            ["--net", "--uts", "--mount", "--propagation", "private"],
            f"hostname {name}",
            f"mount --bind {shlex.quote(str(self.disk))} {home}",
            f"mount --bind {hosts} /etc/hosts",
            "mount -t tmpfs tmpfs /dev/shm",
        )
        self.pid = self._sleeper.pid
        network.enter_switch(f"ip link add port-{name} type veth peer name eth0 netns {self.pid}")
        network.enter_switch(f"ip link set port-{name} master switch up")
        self._inside(f"ip address add {address}/24 dev eth0 && ip link set eth0 up && ip link set lo up")
        (network.nodes / f"{name}.pid").write_text(str(self.pid))

    def _inside(self, command: str) -> None:
        subprocess.run([*self.entering(), "sh", "-c", command], check=True)

    def entering(self) -> list[str]:
        """What goes before a command that is to run here."""
        return ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", f"--wd={self.network.work}"]

    def environment(self) -> dict[str, str]:
        """Variables of somebody who works here."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("RANNC_", "XDG_", "OMPI_"))
        }
        home = self.network.home
        return {
            **inherited,
            "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "OMP_NUM_THREADS": "1",
            "HOME": str(home),
            "TMPDIR": str(home / "tmp"),
            "XDG_RUNTIME_DIR": str(home / "run"),
            "PRTE_MCA_plm_ssh_agent": str(self.network.agent),
            fork_server.VARIABLE: str(self.network.forks),
        }

    def start(self, *command: str, **variables: str) -> subprocess.Popen[str]:
        """A command that runs here, in the folder that all nodes share."""
        return subprocess.Popen(
            [*self.entering(), *command],
            env={**self.environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *command: str, seconds: float = 300.0, **variables: str) -> tuple[int, str]:
        """(exit code, output) of a command here."""
        started = self.start(*command, **variables)
        try:
            output, _ = started.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.network.end_processes()
            output, _ = started.communicate()
            raise AssertionError(f"{shlex.join(command)} did not end:\n{output}") from None
        return started.returncode, output

    def hide(self, path: Path, with_what: Path) -> None:
        """Lay a file or folder over another one, on this node alone."""
        self._inside(f"mount --bind {shlex.quote(str(with_what))} {shlex.quote(str(path))}")

    def cut_off(self) -> None:
        """Take its cable out: packets are lost without a word."""
        self.network.enter_switch(f"ip link set port-{self.name} down")

    def processes(self) -> list[psutil.Process]:
        """What runs here."""
        own = os.stat(f"/proc/{self.pid}/ns/net").st_ino
        found = []
        for process in psutil.process_iter():
            try:
                here = os.stat(f"/proc/{process.pid}/ns/net").st_ino == own
                if here and process.pid != self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """The same without daemons."""
        found = []
        for process in self.processes():
            try:
                if "rannd/daemon/server/boot.py" not in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def empty_within(self, seconds: float) -> bool:
        """Whether all ranks, and what started them, end by themselves."""
        end = time.monotonic() + seconds
        while self.ranks():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True

    def end(self) -> None:
        """Everything that runs here, and the node."""
        while left := self.processes():
            for process in left:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.02)
        self._sleeper.send_signal(signal.SIGKILL)
        self._sleeper.wait()


class Network:
    """Nodes called a, b, ... on one switch.

    `own_on_loopback`: each node's own name is on 127.0.1.1 there, as Debian's installer leaves it. `forks`: the socket
    of the fork server for scripts that are run through it.
    """

    def __init__(self, count: int, forks: Path, *, own_on_loopback: bool = False) -> None:
        self.forks = forks
        self.base = Path(tempfile.mkdtemp(prefix="rn-", dir="/tmp"))  # short: paths of sockets
        self.home = self.base / "home"
        """The home directory, another one on each node."""
        self.work = self.base / "work"
        """A folder that all nodes share, as by NFS."""
        self.nodes = self.base / "nodes"
        for folder in (self.home, self.work, self.nodes):
            folder.mkdir()
        names = [chr(ord("a") + number) for number in range(count)]
        self.addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._own_on_loopback = own_on_loopback
        self.agent = self.base / "agent"
        self.agent.write_text(AGENT.format(agent=self.agent, nodes=self.nodes))
        self.agent.chmod(0o755)
        self.made: list[Node] = []
        self._switch = _sleeping(["--net"], "ip link add switch type bridge", "ip link set switch up")
        try:
            for name, address in self.addresses.items():
                self.made.append(Node(self, name, address))
        except BaseException:
            self.end()
            raise

    def hosts_of(self, node: str) -> str:
        """The /etc/hosts of a node."""
        lines = ["127.0.0.1 localhost"]
        for name, address in self.addresses.items():
            lines.append(f"{'127.0.1.1' if name == node and self._own_on_loopback else address} {name}")
        return "\n".join(lines) + "\n"

    def enter_switch(self, command: str) -> None:
        """A command in the switch's namespace."""
        subprocess.run(["nsenter", "-t", str(self._switch.pid), "--net", "sh", "-c", command], check=True)

    def end_processes(self) -> None:
        """Everything that runs on the nodes."""
        for node in self.made:
            for process in node.processes():
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue

    def end(self) -> None:
        """All nodes, and the files."""
        for node in self.made:
            node.end()
        self._switch.kill()
        self._switch.wait()
        shutil.rmtree(self.base)
