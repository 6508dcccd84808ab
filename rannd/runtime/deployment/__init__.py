"""A plan put to work, checked, and taken back.

In: a `Deployment`. Out: parameters at the ranks that need them, and bound graphs (`deployer.py`, begin there,
`graph_table.py`); `undeploy.py` gives every rank the whole model again; `verify.py` is `verify_partitioning`.
"""
