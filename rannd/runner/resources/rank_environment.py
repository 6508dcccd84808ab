"""Environment variables that ranks get in addition to the user's own."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rannd.ranks.core_share import CORES_VARIABLE

LOWEST_PORT = 20000
"""Ports below belong to well-known services."""
PORT_TRIES = 64

#: glibc: keep freed memory and never mmap single tensors, so that the pages of large tensors are not faulted in again
#: at
#: each step. Saves 17 to 42 % of a step on CPU ranks.
MALLOC_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

#: CUDA: a hardware queue for each stream of transfers (8 GPUs in stages of 3 and 5 have 12, the default is 8 queues);
#: segments that grow in place of new ones, as an allocation that does not fit waits for the whole device; workspaces of
#: cuBLAS with which torch.use_deterministic_algorithms(True) accepts its products (NVIDIA: cuBLAS, "Results
#: Reproducibility"): cuBLAS reads them before a script could set them, and they take 32 MiB.
CUDA_SETTINGS = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
_DESCRIBED = {*MALLOC_SETTINGS, CORES_VARIABLE}
_ALLOCATOR = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)

#: Variables that ranks on other machines need, for launchers that do not pass the whole environment.
_FORWARDED_PREFIXES = (
    "RANNC_",
    "RANND_",
    "PYTHON",
    "NCCL_",
    "GLOO_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "MALLOC_",
    "HF_",
    "MPI4PY_",
)
_FORWARDED_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PATH",
    "VIRTUAL_ENV",
)


@dataclass
class Tuning:
    """Variables that make ranks fast."""

    variables: dict[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """Describe them in one line for the user; '' if there are none."""
        if not self.variables:
            return ""
        # The three malloc settings belong together; docs/launching.md lists their values.
        told = [f"{name}={value}" for name, value in self.variables.items() if name not in _DESCRIBED]
        if CORES_VARIABLE in self.variables:
            told.append("cores of its own for each rank")
        if self.variables.keys() & MALLOC_SETTINGS.keys():
            told.append("malloc that keeps freed memory (MALLOC_*)")
        return f"tuned {', '.join(told)}; --no-tune turns this off"


def tuning(environ: Mapping[str, str], *, cores: int, local_ranks: int, gpus: int, binds: bool = False) -> Tuning:
    """Choose threads, and settings of malloc or CUDA, of ranks; what the user has set is left alone.

    Args:
        environ: The environment.
        cores: Cores of one machine.
        local_ranks: Maximum number of ranks on one machine.
        gpus: GPUs of this machine; if there are any, CUDA's settings are chosen, and malloc is left alone.
        binds: Ranks can be bound to cores.
    """
    result = Tuning()
    share = max(1, cores // local_ranks)
    if "OMP_NUM_THREADS" not in environ:
        result.variables["OMP_NUM_THREADS"] = str(share)
    threads = [environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ]
    fits = all(each.isdecimal() and int(each) <= share for each in threads)
    if binds and gpus == 0 and 1 < local_ranks <= cores and fits and CORES_VARIABLE not in environ:
        result.variables[CORES_VARIABLE] = str(cores)
    own_malloc = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("LD_PRELOAD", "")
    if gpus == 0 and not own_malloc and "GLIBC_TUNABLES" not in environ:
        result.variables |= MALLOC_SETTINGS
    if gpus:
        own_allocator = any(name in environ for name in _ALLOCATOR)
        result.variables |= {
            name: value
            for name, value in CUDA_SETTINGS.items()
            if name not in environ and not (name in _ALLOCATOR and own_allocator)
        }
    return result


def meeting_point(environ: Mapping[str, str], first_host: str | None) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, where rank 0 listens for the others; variables set by the user are kept.

    Args:
        environ: The environment.
        first_host: The host of rank 0, None if all ranks are on this machine.
    """
    wanted = {"MASTER_ADDR": first_host or "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {name: value for name, value in wanted.items() if name not in environ}


def free_port() -> int:
    """Return a TCP port that no process listens on at this moment, on this machine.

    It is below the range that the kernel uses for outgoing connections: until rank 0 listens on it, which takes
    seconds,
    one of these could get it. Two jobs that start at once are unlikely to draw the same number.
    """
    lowest, end = LOWEST_PORT, _first_ephemeral_port()
    for _ in range(PORT_TRIES if end > lowest else 0):
        port = lowest + secrets.randbelow(end - lowest)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    with socket.socket() as probe:
        probe.bind(("", 0))
        found: int = probe.getsockname()[1]
        return found


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def forwarded_names(environ: Iterable[str]) -> list[str]:
    """Return the variables of `environ` that ranks on other machines need."""
    return sorted(name for name in environ if name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED_NAMES)
