"""Closes the MPI launcher's ports to other machines if no rank runs there.

Open MPI's launcher listens on all interfaces, for its own processes on other machines; no setting of PRRTE 3 changes
the address, and with the loopback interface alone (``oob_tcp_if_include``) it does not start. It has opened its ports
before it starts a rank. So they are bound to the loopback interface then, through copies of its descriptors: the kernel
refuses what comes by another interface (``ss -ltn`` shows ``0.0.0.0%lo``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket

from rannd.runner.watch import processes

#: Linux's number of the call, the same on all architectures that Python's wheels exist for. glibc has no function.
_PIDFD_GETFD = 438
_LOOPBACK = b"lo"


def close_to_others(pid: int) -> None:
    """Bind all ports on which a process listens, one of this user's, to the loopback interface.

    Raises:
        OSError: The kernel is too old (5.7 is the first that can) or does not permit it: containers may forbid it.
    """
    process = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                    _close_one(process, int(name))
    finally:
        os.close(process)


def close_session_to_others(session: int) -> None:
    """Bind the ports of all processes of a session: ``mpirun`` may be a script around the one that listens.

    Raises:
        OSError: As `close_to_others`; processes that end meanwhile are none.
    """
    for pid in processes.session_members(session):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            close_to_others(pid)


def _close_one(process: int, descriptor: int) -> None:
    """Bind one socket of a process, if it is a listening one."""
    copy = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        number = ctypes.get_errno()
        if number == errno.EBADF:
            raise FileNotFoundError(number, "closed meanwhile")
        raise OSError(number, f"pidfd_getfd: {os.strerror(number)}")
    with socket.socket(fileno=copy) as end:
        listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and end.family in (socket.AF_INET, socket.AF_INET6):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _LOOPBACK)
