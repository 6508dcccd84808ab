"""The step auditor (`verify_step`, ``rannc-run --verify N``): replays one training step in one process, block by block.

In: a step that all ranks have run, and what each rank kept of it. Out: a line that says how much was equal, or an
AuditError that names the first difference. Start with `step_audit.py`, which every rank has; rank 0 runs `auditor.py`,
and asks the others for what they kept (`step_record.py`) by `record_exchange.py`. `origins.py` knows what should have
arrived where, `block_replay.py` computes one block for one microbatch, `parameter_gradients.py` follows gradients of
parameters through the reduction, `differences.py` says what counts as a difference.
"""
