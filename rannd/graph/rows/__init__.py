"""Where the samples of the batch are in each value of a graph.

In: a traced graph. Out: for each value whether and in which dimension it carries the batch (`analysis.py`, begin
there), and the weights with which losses of microbatches add up to the loss of the mini-batch (`loss_weights.py`).
`rules/` has a rule per operator.
"""
