"""Trace a module to a flat graph.

In: a module and a signature. Out: a `Traced`. Start with `frontend.py`, which tries several methods in turn;
`export.py` calls `torch.export`, `leaf_recorder.py` runs submodules that cannot be exported as opaque operators,
`on_device.py` lets both see the device of the job, `dynamic_shapes.py` reuses one trace for many sizes,
`hook_proofs.py` verifies that torch still calls every hook that tracing relies on.
"""
