"""Batch-dimension analysis of a traced graph.

In: a traced graph. Out: for each value, whether and in which dimension it carries the batch (`analysis.py`, start
there), and the weights with which the losses of microbatches add up to the loss of the mini-batch
(`loss_weights.py`). `rules/` has one propagation rule per operator.
"""
