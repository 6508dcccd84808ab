"""Deployments in files: read with suspicion, written whole or not at all, never through a symbolic link.

Here no torch is needed: a file can be shown on a machine that could not run it.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from rannd.errors import DeploymentError
from rannd.plan.deployment import MAX_BYTES, Deployment, encode


def read_file(file: Path) -> bytes:
    """The content of a file that `save_file` wrote; :func:`rannd.plan.deployment.decode` makes a deployment of it.

    It may belong to another user, because it is data and is checked as such; but nobody besides its owner (and group)
    may have been able to change it.

    Raises:
        DeploymentError: There is no such file, or it is a symbolic link, no plain file, too large, or writable for
            everybody.
    """
    try:
        # Without O_NONBLOCK the opening of a pipe would wait for ever.
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(descriptor)
            _check(file, found)
            with open(descriptor, "rb", closefd=False) as opened:
                data = opened.read(MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as exc:
        if os.path.islink(file):
            raise DeploymentError(
                f"the deployment {file} is a symbolic link to {os.readlink(file)}; name the file itself"
            ) from exc
        raise DeploymentError(
            f"the deployment {file} cannot be read: {exc.strerror}; name a file that save_deployment wrote"
        ) from exc
    if len(data) > MAX_BYTES:
        raise DeploymentError(
            f"the deployment {file} has {found.st_size} bytes, more than {MAX_BYTES}; name a file that "
            "save_deployment wrote"
        )
    return data


def _check(file: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise DeploymentError(f"the deployment {file} is no plain file; name a file that save_deployment wrote")
    if found.st_mode & stat.S_IWOTH:
        raise DeploymentError(
            f"the deployment {file} can be changed by every user of the machine; take that right away (chmod o-w "
            f"{file}) if you trust what is in it"
        )


def save_file(deployment: Deployment, file: Path) -> None:
    """Write a deployment to a file, whole or not at all, in place of the file that may be there.

    Raises:
        DeploymentError: The file is a symbolic link or a folder, or cannot be written.
    """
    file = file.expanduser().absolute()
    if os.path.islink(file):
        raise DeploymentError(
            f"the deployment is not written to {file}, a symbolic link to {os.readlink(file)}; name the file itself"
        )
    draft = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o644), "wb") as opened:
            opened.write(encode(deployment))
            opened.flush()
            os.fsync(opened.fileno())
        # Where a link has come into the way meanwhile, it is replaced, not followed.
        os.replace(draft, file)
    except OSError as exc:
        with suppress(OSError):
            draft.unlink()
        raise DeploymentError(
            f"the deployment cannot be written to {file}: {exc.strerror}; name a file in a folder that is there"
        ) from exc
