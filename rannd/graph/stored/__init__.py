"""Traces as bytes, for the cache.

In and out: a `Traced` model and its bytes (`codec.py`, start there). `encoding.py` is the form of arguments, values and
sizes, `container_text.py` that of containers, and `trace_grammar.py` what a trace from elsewhere may contain.
"""
