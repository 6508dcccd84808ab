"""Writes what is written about the items: ``docs/configuration.md`` and ``conf/rannc_conf.toml``.

``python -m rannd.config.document`` in the root of the repository writes both anew; a test compares them with
the table. In the page only the part between the two marks is generated.
"""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
from pathlib import Path

from rannd.config.item import Item, toml_text
from rannd.config.table import ITEMS

CONF = Path("conf/rannc_conf.toml")
PAGE = Path("docs/configuration.md")
_BEGIN = "<!-- items: begin (python -m rannd.config.document) -->\n"
_END = "<!-- items: end -->\n"


def conf_text() -> str:
    """conf/rannc_conf.toml: every item at its default, below its help."""
    parts = [
        "# Every configuration item with its default. Copy to ~/.pyrannc/rannc_conf.toml, or to the directory that\n"
        "# RANNC_CONF_DIR names, and change what you need. RANNC_<ITEM> in the environment goes before the file.\n"
        "# Written by: python -m rannd.config.document\n"
    ]
    for group, items in itertools.groupby(ITEMS.values(), key=lambda item: item.group):
        parts.append(f"\n# --- {group} ---\n")
        for item in items:
            effect = f" No effect here: {item.no_effect}." if item.no_effect else ""
            words = f"{item.help}{effect} Wanted: {item.wanted}."
            comment = textwrap.fill(words, 110, initial_indent="# ", subsequent_indent="# ")
            parts.append(f"\n{comment}\n{item.name} = {toml_text(item.default)}\n")
    return "".join(parts)


def tables_text() -> str:
    """The tables of docs/configuration.md, one for each group; those without effect in one of their own."""
    parts = []
    working = [item for item in ITEMS.values() if item.no_effect is None]
    for group, items in itertools.groupby(working, key=lambda item: item.group):
        parts.append(
            f"\n### {group}\n\n| item | default | wanted | changes plans | meaning |\n| --- | --- | --- | --- | --- |\n"
        )
        parts.extend(_row(item, "yes" if item.plan_affecting else "no", item.help) for item in items)
    parts.append(
        "\n### Items of RaNNC without effect here\n\n"
        "| item | default | wanted | RaNNC's meaning | why it has no effect |\n| --- | --- | --- | --- | --- |\n"
    )
    parts.extend(_row(item, item.help, item.no_effect) for item in ITEMS.values() if item.no_effect is not None)
    return "".join(parts) + "\n"


def _row(item: Item, *cells: str) -> str:
    return "| " + " | ".join((f"`{item.name}`", f"`{toml_text(item.default)}`", item.wanted, *cells)) + " |\n"


def page_text(page: str) -> str:
    """The page with its generated part made anew.

    Raises:
        ValueError: a mark is missing.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} needs the lines {_BEGIN.strip()!r} and {_END.strip()!r}; put them back")
    return before + begin + tables_text() + end + after


def main() -> None:
    """Writes both files, which must be there, below the current directory."""
    if not PAGE.is_file():
        sys.exit(f"{PAGE} is not in {Path.cwd()}; run this in the root of the repository")
    for path, text in ((CONF, conf_text()), (PAGE, page_text(PAGE.read_text(encoding="utf-8")))):
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)


if __name__ == "__main__":
    main()
