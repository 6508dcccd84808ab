"""Results of checks: one JSON file for all parts, written anew after each check: a cut-off loses one at most."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _gpu import page

FILE, PAGE, STACKS = "gpu.json", "gpu.md", "gpu.stacks"
DONE, LATE, BROKEN = "done", "out of time", "failed"
"""How a part can end."""
NO_DEVICE = 3
"""Exit code of a process whose device computes no more: after an illegal access, say, all later calls fail as well."""
TOLD = 1500
"""Characters of a stack that a result shows."""


@dataclass(frozen=True)
class Result:
    """What one check has found."""

    name: str
    ok: bool | None
    """None: reported, but not judged."""
    found: float | str
    unit: str = ""
    limit: str = ""
    """What was asked for, as text."""
    note: str = ""


@dataclass
class Part:
    """Results of one part of the measurements."""

    name: str
    seconds: float = 0.0
    ended: str = LATE
    begun: int = 0
    """Checks that were begun, or left out."""
    running: str = ""
    """Name of the check that runs."""
    results: list[Result] = field(default_factory=list)


def at_most(name: str, found: float, limit: float, unit: str = "", note: str = "", *, judged: bool = True) -> Result:
    """A number that must not be larger than `limit`; NaN is never right."""
    return Result(name, found <= limit if judged else None, found, unit, f"at most {limit:g}", note)


def at_least(name: str, found: float, limit: float, unit: str = "", note: str = "", *, judged: bool = True) -> Result:
    """A number that must not be smaller than `limit`; NaN is never right."""
    return Result(name, found >= limit if judged else None, found, unit, f"at least {limit:g}", note)


def raised(name: str, exc: BaseException) -> Result:
    """An error, and where it comes from."""
    where = "".join(traceback.format_exception(exc))
    print(where, file=sys.stderr, flush=True)
    return Result(name, False, f"{type(exc).__name__}: {str(exc)[:500]}", note=where[-TOLD:])


Check = tuple[str, Callable[[], Iterable[Result]]]
"""Name of a check, and the function that carries it out."""


class Record:
    """The results of one part, on their way into the file.

    Args:
        folder: Where the file and the page are.
        part: Name of the part, whose earlier results are replaced.
        machine: What the results were measured on.
        goes_on: Whether it goes on after the checks that an earlier process had begun.
    """

    def __init__(self, folder: Path, part: str, machine: Mapping[str, Any], *, goes_on: bool = False) -> None:
        self._folder = folder
        self._machine = machine
        self.part = (goes_on and known(folder, part)) or Part(part)
        self._begun = time.monotonic() - self.part.seconds

    def run(
        self,
        checks: Iterable[Check],
        budget_s: float,
        only: str = "",
        *,
        limit_s: float | None = None,
        alive: Callable[[], object] = bool,
    ) -> None:
        """Carry out checks, one after the other; those that would begin after the budget are left out.

        Args:
            checks: The checks, each of which may have several results.
            budget_s: Seconds for all of them.
            only: Checks with this in their name.
            limit_s: Seconds of one check, after which this process writes down its stacks and ends.
            alive: Raises if the device computes no more. Called after an error; this process ends then.
        """
        self.part.ended = LATE
        for place, (name, check) in enumerate(checks, 1):
            if place <= self.part.begun:
                continue
            if only not in name:
                self.part.begun = place
                continue
            if time.monotonic() - self._begun > budget_s:
                print(f"{self.part.name}: out of time before '{name}'", flush=True)
                return
            begun = time.monotonic()
            self.part.begun, self.part.running = place, name
            self._write()
            error = None
            with (self._folder / STACKS).open("w") as stacks:
                if limit_s is not None:
                    faulthandler.dump_traceback_later(limit_s, exit=True, file=stacks)
                try:
                    for result in check():
                        self._add(result)
                except Exception as exc:
                    error = raised(name, exc)
                faulthandler.cancel_dump_traceback_later()
            self.part.running = ""
            if error is not None:
                self._add(error)
                try:
                    alive()
                except Exception as exc:
                    print(f"{self.part.name}: the device computes no more: {exc}", file=sys.stderr, flush=True)
                    os._exit(NO_DEVICE)
            print(f"{self.part.name}: {name} took {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        self.part.ended = DONE
        (self._folder / STACKS).unlink(missing_ok=True)
        self._write()

    def _add(self, result: Result) -> None:
        self.part.results.append(result)
        print(f"{self.part.name}: {page.line(asdict(result))}", flush=True)
        self._write()

    def _write(self) -> None:
        self.part.seconds = time.monotonic() - self._begun
        put(self._folder, self.part, self._machine)


def put(folder: Path, part: Part, machine: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a part's results in the file of `folder`, and write file and page anew; returns what the file holds."""
    folder.mkdir(parents=True, exist_ok=True)
    told = read(folder)
    before = told.get("machine", {})  # empty where a part has ended before it has looked at the device
    if before and machine and any(before.get(name) != machine.get(name) for name in ("device", "torch")):
        told = {}  # of another machine
    told["machine"] = {**(machine or before)}
    told.setdefault("parts", {})[part.name] = _plain(asdict(part))
    for name, text in ((FILE, json.dumps(told, indent=1) + "\n"), (PAGE, page.page(told))):
        whole = folder / f"{name}.new"
        whole.write_text(text, encoding="utf-8")
        os.replace(whole, folder / name)
    return told


def read(folder: Path) -> dict[str, Any]:
    """What the file of `folder` holds; {} if there is none."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def known(folder: Path, part: str) -> Part | None:
    """A part in the file of `folder`."""
    told = read(folder).get("parts", {}).get(part)
    return Part(**{**told, "results": [Result(**each) for each in told["results"]]}) if told else None


def _plain(value: Any) -> Any:
    """The same value without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
