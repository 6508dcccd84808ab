"""`rannc-cache show`: an entry; of a deployment its plan, drawn, as a page of HTML, or against another one."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import click

from rannd.daemon.cli_common import duration_text, print_json, size_text
from rannd.daemon.client.requests import DaemonSession
from rannd.daemon.common.compression import PackedValue
from rannd.daemon.common.keys import measured_key
from rannd.daemon.common.printable import plain
from rannd.daemon.common.protocol import EntryInfo
from rannd.errors import DeploymentError, ProtocolError, UsageError
from rannd.plain_file import PlainFile
from rannd.plan.deployment import Deployment, decode
from rannd.plan.measured_step import MeasuredStep, decode_measured
from rannd.plan.plan_text import aligned, show_measured
from rannd.plan.plan_text import show as plan_text
from rannd.runner.cache.entries import date, greeted, json_option, only

_NARROWEST = 60
"""Columns of a terminal, at least, for which tables are laid out."""
_PAGE = PlainFile("page", "rannc-cache show --html", UsageError, 1 << 30)


@click.command()
@click.argument("key")
@click.option("--key", "whole_key", is_flag=True, help="Also the components of the key: all that can change the value.")
@click.option(
    "--html", metavar="FILE", type=click.Path(path_type=Path), help="Write a page of HTML about a deployment to FILE."
)
@click.option("--against", metavar="KEY", help="Show in what a deployment differs from this one.")
@json_option
def show(key: str, whole_key: bool, html: Path | None, against: str | None, as_json: bool) -> None:
    """Show the entry whose key starts with KEY; for a deployment, first the plan, and what its steps took."""
    session = greeted()
    entry = only(session, key)
    if html is not None:
        _write_page(session, entry, html, against, as_json)
        return
    if against is not None:
        _show_differences(session, entry, against, as_json)
        return
    plan, problem = _deployment(session, entry)
    measured, damage = _measured(session, entry, plan)
    if as_json:
        told = {name: getattr(entry, name) for name in entry.__struct_fields__}
        print_json({**told, "deployment": plan, "measured": measured} if entry.kind == "deployment" else told)
        return
    width = max(shutil.get_terminal_size().columns, _NARROWEST) if sys.stdout.isatty() else None
    if problem:
        click.echo(f"The deployment cannot be shown: {problem}\n")
    elif plan is not None:
        click.echo(plan_text(plan, width=width) + "\n")
        click.echo(_drawing(plan, width) + "\n")
    if damage:
        click.echo(f"What its steps took cannot be shown: {damage}\n")
    elif plan is not None and measured is not None:
        click.echo(show_measured(plan, measured, width) + "\n")
    now = time.time()
    click.echo(f"key        {entry.key}")
    click.echo(f"kind       {entry.kind}, format {entry.format}, written by rannd {plain(entry.rannd)}")
    click.echo(f"created    {date(entry.created)}, {duration_text(now - entry.created)} ago")
    click.echo(f"last used  {date(entry.used)}, {duration_text(now - entry.used)} ago, {entry.hits} hits")
    click.echo(f"length     {entry.length} bytes")
    click.echo(f"checksum   {entry.checksum}")
    if not whole_key:
        return
    click.echo("components")
    for name, text in sorted(entry.components.items()):
        click.echo(plain(f"  {name} = {text}"))


def _drawing(plan: Deployment, width: int | None) -> str:
    """Memory and schedule, as wide as the terminal."""
    from rannd.runner.page.terminal_drawing import WIDTH, drawn  # with numpy, which takes a while

    return drawn(plan, width or WIDTH)


def _write_page(session: DaemonSession, entry: EntryInfo, file: Path, against: str | None, as_json: bool) -> None:
    from rannd.runner.page.html_page import ShownPlan, page

    plan, measured, damage = _readable(session, entry)
    compared = None
    if against is not None:
        other = only(session, against)
        other_plan, other_measured, _ = _readable(session, other)
        compared = ShownPlan(other.key, other_plan, other_measured)
    written = f"written {date(entry.created)} by rannd {plain(entry.rannd)}"
    made = page(ShownPlan(entry.key, plan, measured), written, compared)
    _PAGE.write(made, file)
    if as_json:
        print_json({"file": str(file), "bytes": len(made)})
        return
    click.echo(f"wrote a page of {size_text(len(made))} to {file}")
    if damage:
        click.echo(f"without what its steps took: {damage}")


def _show_differences(session: DaemonSession, entry: EntryInfo, against: str, as_json: bool) -> None:
    from rannd.runner.page.plan_difference import differences_of, differing

    plan, _, _ = _readable(session, entry)
    other_entry = only(session, against)
    other, _, _ = _readable(session, other_entry)
    found = differing(differences_of(plan, other))
    if as_json:
        print_json({"key": entry.key, "against": other_entry.key, "differences": found})
        return
    if plan.graph_hash != other.graph_hash:
        click.echo("They are plans of different graphs.\n")
    if not found:
        click.echo("the plans do not differ in what is compared")
        return
    rows = [(row.what, row.this, row.other, row.change) for row in found]
    click.echo(aligned(("what differs", entry.key[:12], other_entry.key[:12], "relative"), rows))


def _readable(session: DaemonSession, entry: EntryInfo) -> tuple[Deployment, MeasuredStep | None, str]:
    """Return a deployment, what its steps took, and why that is not known although it is there.

    Raises:
        UsageError: The entry is no deployment.
        DeploymentError: It cannot be read.
    """
    if entry.kind != "deployment":
        raise UsageError(
            f"the entry {entry.key[:12]} is of kind {entry.kind}, not a deployment; `rannc-cache ls --kind deployment` "
            "lists the deployments"
        )
    plan, problem = _deployment(session, entry)
    if plan is None:
        raise DeploymentError(f"the deployment {entry.key[:12]} cannot be shown: {problem}")
    return (plan, *_measured(session, entry, plan))


def _deployment(session: DaemonSession, entry: EntryInfo) -> tuple[Deployment | None, str]:
    """Return the deployment of an entry, or why it is not available; (None, '') for entries of other kinds.

    Raises:
        DeploymentError: The entry, of any kind, is corrupt or was removed.
    """
    value = _value(session, entry)
    return read_deployment(value) if entry.kind == "deployment" else (None, "")


def _value(session: DaemonSession, entry: EntryInfo) -> PackedValue:
    """Return the value of an entry; DeploymentError if it is corrupt, or was removed after it was listed."""
    corrupt = session.state().statistics.corrupt
    (value,) = session.values([entry])
    if value is not None:
        return value
    told = f"the {entry.kind} {entry.key[:12]} cannot be shown"
    if session.state().statistics.corrupt > corrupt:
        raise DeploymentError(
            f"{told}: its stored bytes do not match their checksum; the entry was set aside, and the next run that "
            "needs it computes it again"
        )
    raise DeploymentError(f"{told}: it was removed in the meantime; see `rannc-cache ls`")


def _measured(session: DaemonSession, entry: EntryInfo, plan: Deployment | None) -> tuple[MeasuredStep | None, str]:
    """Return what steps of an entry's deployment took, or why that cannot be; (None, '') if it is not known."""
    found = list(session.entries(measured_key(entry.key).digest)) if plan is not None else []
    if plan is None or not found:
        return None, ""
    try:
        return decode_measured(_value(session, found[0]).plain(), plan), ""
    except (DeploymentError, ProtocolError) as exc:
        return None, str(exc)


def read_deployment(value: PackedValue) -> tuple[Deployment | None, str]:
    """Decode the value of a deployment's entry, or say why that is not possible."""
    try:
        return decode(value.plain()), ""
    except (DeploymentError, ProtocolError) as exc:
        return None, str(exc)
