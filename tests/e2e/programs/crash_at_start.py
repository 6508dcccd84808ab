"""Raises at once, on every rank."""

raise RuntimeError("this program crashes at its start")
