"""Step simulator: predicts time and memory of a step by running its Program on costs.

In: a `Deployment` or a Program with costs. Out: time, memory and a timeline. Begin with `simulator.py`.
"""
