"""Results of checks: one JSON file for all parts, written anew after each check: a cut-off loses one at most."""

from __future__ import annotations

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

FILE, PAGE = "gpu.json", "gpu.md"
DONE, LATE, BROKEN = "done", "out of time", "failed"
"""How a part can end."""


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
    results: list[Result] = field(default_factory=list)


def at_most(name: str, found: float, limit: float, unit: str = "", note: str = "", *, judged: bool = True) -> Result:
    """A number that must not be larger than `limit`; NaN is never right."""
    return Result(name, found <= limit if judged else None, found, unit, f"at most {limit:g}", note)


def at_least(name: str, found: float, limit: float, unit: str = "", note: str = "", *, judged: bool = True) -> Result:
    """A number that must not be smaller than `limit`; NaN is never right."""
    return Result(name, found >= limit if judged else None, found, unit, f"at least {limit:g}", note)


Check = tuple[str, Callable[[], Iterable[Result]]]
"""Name of a check, and the function that carries it out."""


class Record:
    """The results of one part, on their way into the file.

    Args:
        folder: Where the file and the page are.
        part: Name of the part, whose earlier results are replaced.
        machine: What the results were measured on.
    """

    def __init__(self, folder: Path, part: str, machine: Mapping[str, Any]) -> None:
        self._folder = folder
        self._machine = machine
        self._begun = time.monotonic()
        self.part = Part(part)

    def run(self, checks: Iterable[Check], budget_s: float, only: str = "") -> None:
        """Carry out checks, one after the other; those that would begin after the budget are left out.

        Args:
            checks: The checks, each of which may have several results.
            budget_s: Seconds for all of them.
            only: Checks with this in their name.
        """
        for name, check in checks:
            if only not in name:
                continue
            if time.monotonic() - self._begun > budget_s:
                print(f"{self.part.name}: out of time before '{name}'", flush=True)
                return
            begun = time.monotonic()
            try:
                for result in check():
                    self._add(result)
            except Exception as exc:
                traceback.print_exc()
                self._add(Result(name, False, f"{type(exc).__name__}: {str(exc)[:500]}"))
            print(f"{self.part.name}: {name} took {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        self.part.ended = DONE
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
    if any(told.get("machine", {}).get(name) != machine.get(name) for name in ("device", "torch")):
        told = {}  # of another machine
    told["machine"] = {**machine}
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


def _plain(value: Any) -> Any:
    """The same value without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
