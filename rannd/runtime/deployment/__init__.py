"""Deploys a model, verifies its graph, and undoes the deployment.

In: a `Deployment`. Out: parameters on the ranks that run them, and graphs bound to the deployment (`deployer.py`, begin
there); `undeploy.py` restores the whole model on every rank; `verify.py` is `verify_partitioning`;
`step_measuring.py` gathers what its steps took.
"""
