"""The limit of open files of this process: raised where many ranks are expected, whose connections are files.

The usual limit of 1,024 is a soft one, which a process may raise up to the hard one; its children inherit it. Standard
library only: importing this costs rannc-run nothing.
"""

from __future__ import annotations

import resource

SPARE = 1024
"""Files by which the limit is raised further: what a script may open by itself under the usual limit."""


def make_room(files: int, why: str) -> str:
    """Raise the soft limit to `files` and `SPARE`, if it is lower than `files`, as far as the hard limit allows.

    Args:
        files: Number of files that this process or its children will have open.
        why: What needs them, for the message.

    Returns:
        '' if `files` can be open, otherwise what is wrong, and what to do.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= files:
        return ""
    allowed = files + SPARE if hard == resource.RLIM_INFINITY else min(files + SPARE, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # a sandbox forbids it, or it is above fs.nr_open
        allowed = soft
    if allowed >= files:
        return ""
    return (
        f"{why} need up to {files} open files, and this process may open {allowed} (ulimit -Hn): raise that limit, by "
        "'nofile' in /etc/security/limits.conf, LimitNOFILE= in a systemd unit, or docker run --ulimit nofile="
    )
