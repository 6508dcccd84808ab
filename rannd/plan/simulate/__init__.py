"""What a step takes and needs, by playing its Program on costs.

In: a `Deployment` or a Program with costs. Out: time, memory and a timeline. Begin with `simulator.py`.
"""
