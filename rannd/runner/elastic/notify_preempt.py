"""The command ``rannc-run notify-preempt``: tells the elastic jobs of this machine that a host is going away."""

from __future__ import annotations

import click

from rannd.errors import LaunchError, UsageError
from rannd.ranks.host_name import encodable
from rannd.runner.resources.host_list import is_local
from rannd.runner.watch import notice_socket, wire
from rannd.runner.watch.notice_socket import MOST_S, Notice, Noticed

ANSWER_S = 30.0
"""Seconds that a job gets for its answer: between two starts it may be busy."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("host", default="")
@click.option(
    "--in",
    "seconds",
    type=float,
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds until the host goes.",
)
def notify_preempt(host: str, seconds: float) -> None:
    """Tell the elastic jobs that run on this machine that HOST, by default this machine, is going away.

    Their ranks save and end 20 seconds before it goes, and go on without it. If rannc-run itself runs there, the job
    ends, and its next run goes on from there. Each job of this user answers on a line; the exit code is 0 if one has
    taken the notice, else 7.
    """
    if not 0 <= seconds <= MOST_S:  # nor NaN
        raise UsageError(f"--in {seconds:g} is no number of seconds from 0 to {MOST_S:g}")
    notice = Notice("" if not host or is_local(host) else host, seconds)
    answers = [answer for answer in (_answer(name, notice) for name in _listeners()) if answer is not None]
    if not answers:
        raise LaunchError(
            "no elastic job of this user runs on this machine; call notify-preempt on a machine on which rannc-run "
            "--elastic or one of its ranks runs"
        )
    if not any(answer.taken for answer in answers):
        raise LaunchError("; ".join(encodable(answer.text) for answer in answers))
    for answer in answers:
        click.echo(encodable(answer.text))


def _listeners() -> list[str]:
    try:
        return notice_socket.listeners()
    except OSError as error:
        raise LaunchError(f"sockets cannot be listed: {error}; notify-preempt needs Linux's /proc") from None


def _answer(name: str, notice: Notice) -> Noticed | None:
    """Return the answer of what listens at a name, None of another user or of a job that has just ended."""
    try:
        return notice_socket.ask(name, notice, ANSWER_S)
    except ConnectionRefusedError:
        return None
    except TimeoutError:
        return Noticed(False, f"a job has not answered within {ANSWER_S:g} s; it takes the notice when it can")
    except (OSError, wire.WireError) as error:
        return Noticed(False, f"a job has not answered: {error}")
