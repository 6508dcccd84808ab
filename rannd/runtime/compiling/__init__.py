"""Compiles the blocks of a stage with torch.compile (`compile_stages`), each kind of block once.

In: this rank's stage of a graph. Out: a `CompiledStage`, which runs it piece by piece. Begin with `stage_compiling.py`:
`stage_units.py` divides the stage, `layouts.py` finds out how the inputs of each unit lie in memory, `kinds.py` makes
equal units one kind, `sharing.py` compiles each kind on one rank of a node and lets the others load it, `compiler.py`
runs torch.compile, and `kept_code.py` keeps what it makes for later runs. `measured_code.py` is for the profiler.
"""
