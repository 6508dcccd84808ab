"""Deployments in files.

Here no torch is needed: a file can be shown on a machine that could not run it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from rannd.errors import DeploymentError
from rannd.plain_file import PlainFile
from rannd.plan.deployment import MAX_BYTES, Deployment, encode

_FILE = PlainFile("deployment", "save_deployment", DeploymentError, MAX_BYTES)


def read_file(file: Path) -> bytes:
    """The content of a file that `save_file` wrote; :func:`rannd.plan.deployment.decode` makes a deployment of it.

    DeploymentError where it cannot be trusted, see PlainFile.
    """
    return _FILE.read(file)


def named(file: Path) -> AbstractContextManager[None]:
    """What is wrong with the deployment in a file is told with the file's name."""
    return _FILE.named(file)


def save_file(deployment: Deployment, file: Path) -> None:
    """Write a deployment to a file, whole or not at all, in place of the file that may be there.

    DeploymentError where it is a symbolic link or a folder, or cannot be written.
    """
    _FILE.write(encode(deployment), file)
