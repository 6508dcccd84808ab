"""Reads TOML with the line number of every key and table, for error messages."""

from __future__ import annotations

from pathlib import Path

import tomli

from rannd.errors import ConfigError

#: Names and indices from the top of the document, such as ("sink", 0, "name").
KeyPath = tuple[str | int, ...]


class TomlFile:
    """A parsed TOML file.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8 or is not TOML; the message has the line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = path.read_bytes()
        except FileNotFoundError as exc:
            raise ConfigError(f"{path}: there is no such file; is the path right?") from exc
        except OSError as exc:
            raise ConfigError(f"{path}: cannot be read: {exc.strerror}; fix its permissions or remove it") from exc
        try:
            text = data.decode()
        except UnicodeDecodeError as exc:
            line = data.count(b"\n", 0, exc.start) + 1
            raise ConfigError(
                f"{path}:{line}: not UTF-8 text (byte 0x{data[exc.start]:02x}); save it as UTF-8"
            ) from exc
        try:
            self.data = tomli.loads(text)
        except tomli.TOMLDecodeError as exc:
            raise ConfigError(f"{path}:{exc.lineno}: not TOML: {exc.msg} (column {exc.colno})") from exc
        except RecursionError as exc:
            raise ConfigError(f"{path}: not TOML: nested too deeply") from exc
        self._lines = _lines_of(text)

    def where(self, *path: str | int) -> str:
        """``file:line`` of a key or table, or of the innermost enclosing table that has a line."""
        for length in range(len(path), 0, -1):
            line = self._lines.get(path[:length])
            if line is not None:
                return f"{self.path}:{line}"
        return str(self.path)


def _lines_of(text: str) -> dict[KeyPath, int]:
    """The line of each key and table header of a valid document.

    In a valid document, a statement is the shortest sequence of whole lines that is valid TOML by itself (an open
    string or array is not), so the parser finds where each statement ends.
    """
    lines: dict[KeyPath, int] = {}
    counts: dict[tuple[str, ...], int] = {}
    table: KeyPath = ()
    start, statement = 1, ""
    # Not splitlines(): TOML ends a line only at a line feed.
    for number, line in enumerate(text.split("\n"), start=1):
        if not statement:
            start = number
        statement += line + "\n"
        try:
            parsed = tomli.loads(statement)
        except tomli.TOMLDecodeError:
            continue
        if statement.lstrip().startswith("["):
            table = _header(parsed, counts)
            lines.setdefault(table, start)
            lines.setdefault(table[:1], start)
        elif parsed:
            (key,) = parsed
            lines.setdefault((*table, key), start)
        statement = ""
    return lines


def _header(parsed: dict[str, object], counts: dict[tuple[str, ...], int]) -> KeyPath:
    """The path of a table header; `counts` holds the number of elements of each array of tables so far."""
    names: list[str] = []
    inner: object = parsed
    while isinstance(inner, dict) and inner:
        ((name, inner),) = inner.items()
        names.append(name)
    if not isinstance(inner, list):
        return tuple(names)
    index = counts.get(tuple(names), 0)
    counts[tuple(names)] = index + 1
    return (*names, index)
