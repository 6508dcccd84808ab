"""The key of a cached trace: equal keys, equal graphs.

In: a model and a call, before anything is traced. Out: a `Fingerprint` (`fingerprint.py`, start there) of everything
that a trace may depend on: code (`code_inspector.py`, `bytecode.py`), values (`value_writer.py`, `module_writer.py`),
versions and origins of libraries (`provenance.py`, `patched_libraries.py`). Reading it runs no user code
(`introspect.py`).
"""
