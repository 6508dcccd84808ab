"""Hooks of mkdocs, for mkdocs.yml: README is the home page, and links out of docs/ work on the site as on GitHub.

Pages are written for GitHub, where a link is relative to the file. On the site docs/ is the root, so README becomes
index.md, and every other file of the repository that a page links to is copied to its own path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
HOME = "README.md"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
NAMED_PAGE = re.compile(r"docs/([\w-]+)\.md")


def _source(uri: str) -> str:
    """Path in the repository of a page of the site."""
    if uri == "index.md":
        return HOME
    return f"docs/{uri}" if (ROOT / "docs" / uri).exists() else uri


def _uri(source: str) -> str:
    """The inverse of `_source`."""
    if source == HOME:
        return "index.md"
    return source.removeprefix("docs/")


def _target(link: str, source: str) -> tuple[str, str] | None:
    """The file of the repository that a link in `source` leads to, and the anchor; None: a link to elsewhere."""
    path, mark, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), mark + anchor


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add README, and what pages link to outside of docs/, with what those pages link to."""
    waiting = [HOME, *(f"docs/{file.src_uri}" for file in files if file.is_documentation_page())]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.startswith("docs/"):
            files.append(File.generated(config, _uri(source), abs_src_path=str(ROOT / source)))
        if not source.endswith(".md"):
            continue
        for _, link, _ in LINK.findall((ROOT / source).read_text()):
            target = _target(link, source)
            if target and target[0] not in seen and (ROOT / target[0]).is_file():
                seen.add(target[0])
                waiting.append(target[0])
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links start where the page is on the site."""
    source = _source(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        target = _target(match[2], source)
        if target is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(_uri(target[0]), folder or '.')}{target[1]}{match[3]}"

    return LINK.sub(on_site, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the pages that docstrings name, as in docs/parameters.md, by their titles."""
    if page.file.src_uri != "api.md":
        return html

    def link(match: re.Match[str]) -> str:
        title = (ROOT / match[0]).read_text().partition("\n")[0].removeprefix("# ")
        return f'<a href="../{match[1]}/">{title}</a>'

    return NAMED_PAGE.sub(link, html)
