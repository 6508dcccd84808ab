"""From a module to a flat graph.

In: a module and a signature. Out: a `Traced`. Begin with `frontend.py`, which tries one way after the other;
`export.py` calls `torch.export`, `leaf_recorder.py` runs submodules that cannot be exported as opaque operators,
`dynamic_shapes.py` makes one trace serve many sizes, `hook_proofs.py` proves that torch still calls every hook that
tracing relies on.
"""
