"""ZeRO: the replicas of a stage share what each would otherwise hold as a whole.

In: the parameters that a rank holds, and the replicas of its stage. Out: which elements of which parameter are a
replica's own (`division.py`, begin there), an optimizer that steps those alone (`sharded_step.py`) or float32 copies of
them (`master_weights.py`), and what its state is of a whole parameter (`state_pieces.py`, `flat_boxes.py`). What is
offloaded is in a `StateHome` (`state_home.py`): a mapped file or the host's memory.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""
