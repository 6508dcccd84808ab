"""Traces as bytes, for the cache.

In and out: a `Traced` model and its bytes (`codec.py`, start there). `encoding.py` is the form of arguments, values and
sizes, `container_text.py` that of containers. What a trace from elsewhere may contain: `trace_grammar.py` (the whole),
`graph_grammar.py`, `operator_grammar.py`, `size_grammar.py`, `leaf_grammar.py` (its parts), `grammar_rules.py` (what
they are made of), and `soundness.py` (what the parts say of each other).
"""
