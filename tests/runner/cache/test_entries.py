"""Ages, sizes and keys as a user types them."""

from __future__ import annotations

import pytest

from rannd.errors import UsageError
from rannd.runner.cache.entries import duration, entries_text, prefix, size


@pytest.mark.parametrize(
    ("text", "seconds"), [("7d", 604800), ("12h", 43200), ("1.5m", 90), ("0s", 0), ("2w", 1209600)]
)
def test_time_spans(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "1e3s", "nan", "٣d"])
def test_what_is_no_time_span(text: str) -> None:
    with pytest.raises(UsageError, match="time span"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("0B", 0),
        ("100B", 100),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("500MB", 500_000_000),
        ("2GB", 2_000_000_000),
        ("2 GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "2", "2G", "GB", "-1GB", "1e3B", "2gb", "iB", "1iB", "2GBs", "٣GB", "1.GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size; write a number and one of"):
        size(text)


def test_a_time_span_that_no_message_could_name() -> None:
    with pytest.raises(UsageError, match="more than thirty years"):
        duration("12000d")


def test_a_size_that_no_message_could_name() -> None:
    with pytest.raises(UsageError, match="more than"):
        size("999999999TB")


def test_starts_of_keys() -> None:
    assert prefix("00ff") == "00ff"
    for wrong in ("00f", "xyz!", "0" * 41, "00FF", "00ff\n"):
        with pytest.raises(UsageError, match="4 to 40 digits"):
            prefix(wrong)


def test_numbers_of_entries() -> None:
    assert [entries_text(number) for number in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]
