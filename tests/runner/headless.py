"""Chromium without a window, which Debian's driver of it controls."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def _lacking(what: str) -> None:
    """Skip the test, but in CI, where it has to run."""
    reason = f"{what}; `make test` installs it where it may (.ci/browser)"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A driver with a profile of its own in `folder`; skips the test where there is no Chromium."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        _lacking("there is no chromium with its chromedriver")
        return
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service
    except ModuleNotFoundError:
        _lacking(f"selenium is not installed for {sys.executable}")
        return
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in (
        "--headless=new",
        "--no-sandbox",  # root has none, nor have most containers; the pages are our own
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield found
    finally:
        found.quit()
