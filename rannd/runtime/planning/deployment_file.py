"""Reads and writes files with deployments.

It does not import torch, so that a file can be shown on a machine without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from rannd.errors import DeploymentError
from rannd.plain_file import PlainFile
from rannd.plan.deployment import MAX_BYTES, Deployment, encode

_FILE = PlainFile("deployment", "save_deployment", DeploymentError, MAX_BYTES)


def read_file(file: Path) -> bytes:
    """Read a file written by `save_file`; :func:`rannd.plan.deployment.decode` decodes its content.

    DeploymentError if the file cannot be read or trusted, see `PlainFile`.
    """
    return _FILE.read(file)


def named(file: Path) -> AbstractContextManager[None]:
    """Context manager that prefixes errors about a deployment with the name of its file."""
    return _FILE.named(file)


def save_file(deployment: Deployment, file: Path) -> None:
    """Write a deployment to a file atomically, replacing an existing one.

    DeploymentError if the file is a symbolic link or a folder, or cannot be written.
    """
    _FILE.write(encode(deployment), file)
