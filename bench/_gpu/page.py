"""Results as a page, and whether they are good enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PARTS = ("correct", "speed", "estimates", "shared")


def verdicts(told: Mapping[str, Any]) -> list[tuple[str, bool | None]]:
    """(what is asked for, whether it is so) for each goal; None: it was not judged here, or its part did not run."""
    parts: Mapping[str, Any] = told.get("parts", {})

    def among(part: str, *words: str) -> bool | None:
        """Whether all judged results of a part with one of these words in their names are right."""
        results = parts.get(part, {}).get("results", [])
        named = [each for each in results if not words or any(word in each["name"] for word in words)]
        judged = [each["ok"] for each in named if each["ok"] is not None]
        return all(judged) if judged else None

    goals = [
        ("all correct on one rank", among("correct")),
        ("all correct, and failures told, on ranks that share a device", among("shared")),
        ("at most one device read or synchronisation in a steady step", among("speed", "reads", "synchronisations")),
        ("a step takes at most 1.05 of eager PyTorch's", among("speed", "step /")),
        ("estimates of time and memory within 15 %", among("estimates")),
        ("one rank has at least 0.98 of eager PyTorch's throughput", among("speed", "throughput / eager")),
        (
            "compiled blocks have at least 0.98 of torch.compile's throughput",
            among("speed", "throughput / torch.compile"),
        ),
    ]
    for name, part in parts.items():
        if part["ended"] != "done":
            goals.append((f"part {name} ran to its end ({part['ended']})", False))
    return goals


def failed(told: Mapping[str, Any], parts: Sequence[str]) -> bool:
    """Whether a result of these parts is wrong, or one of them has not come to its end."""
    found = [told.get("parts", {}).get(name, {"ended": "never begun", "results": []}) for name in parts]
    return any(part["ended"] != "done" or any(each["ok"] is False for each in part["results"]) for part in found)


def line(result: Mapping[str, Any]) -> str:
    """A result on one line."""
    parts = [f"{_mark(result['ok']):5s} {result['name']}: {_number(result['found'])} {result['unit']}".rstrip()]
    parts += [f"({result['limit']})"] * bool(result["limit"]) + [f"[{result['note']}]"] * bool(result["note"])
    return " ".join(parts)


def ending(told: Mapping[str, Any]) -> str:
    """The goals, one a line."""
    words = {True: "go", False: "NO-GO", None: "not judged"}
    return "\n".join(f"{words[ok]:10s} {goal}" for goal, ok in verdicts(told)) + "\n"


def page(told: Mapping[str, Any]) -> str:
    """The whole page, in Markdown."""
    machine = told.get("machine", {})
    lines = ["# One GPU", "", "| on | |", "| --- | --- |"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in machine.items()]
    lines += ["", "```text", ending(told).rstrip("\n"), "```"]
    for name in PARTS:
        if name not in told.get("parts", {}):
            continue
        part = told["parts"][name]
        lines += ["", f"## {name}: {part['ended']}, {part['seconds']:.0f} s", ""]
        lines += ["| | what | found | asked | note |", "| --- | --- | --- | --- | --- |"]
        for each in part["results"]:
            found = f"{_number(each['found'])} {each['unit']}".strip()
            cells = (_mark(each["ok"]), each["name"], found, each["limit"], each["note"])
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines) + "\n"


def _mark(ok: bool | None) -> str:
    return {True: "ok", False: "WRONG", None: "-"}[ok]


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
