"""What a script of bench/ has kept, as bench/all.py reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KEPT = "BENCH_KEPT"
"""Variable that names the file."""


def tables(file: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by the titles of tables; a row's cells by the names of columns."""
    found: dict[str, list[dict[str, Any]]] = {}
    heads: dict[str, list[str]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        if "columns" in line:
            heads[line["table"]] = [name for name, _ in line["columns"]]
            found.setdefault(line["table"], [])
        elif "cells" in line:
            found[line["table"]].append(dict(zip(heads[line["table"]], line["cells"], strict=True)))
    return found


def goals(file: Path) -> dict[str, list[float]]:
    """Numbers by the names of goals."""
    found: dict[str, list[float]] = {}
    for line in map(json.loads, file.read_text().splitlines()):
        if "goal" in line:
            found.setdefault(line["goal"], []).append(line["value"])
    return found
