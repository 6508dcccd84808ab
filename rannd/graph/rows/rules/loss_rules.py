"""Rules of loss functions."""

from __future__ import annotations

from torch.fx import Node

from rannd.graph.rows.rules.operation import Operation, aligned, rule, together
from rannd.graph.rows.rules.states import Coupled, Reduction, Rows, Scalar, State


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
      "kl_div", "soft_margin_loss", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss")  # fmt: skip
def elementwise_loss(op: Operation) -> State:
    reduction = op.args.get("reduction", 1)
    rows = aligned(op, [value for value in op.args.values() if isinstance(value, Node)])
    if reduction == 0:
        return Rows(len(op.out) + rows.dim, rows.outer, rows.inner)
    return _reduced(reduction)


def _reduced(reduction: int) -> Scalar:
    return Scalar(Reduction.MEAN if reduction == 1 else Reduction.SUM)


@rule("triplet_margin_loss")
def triplet_margin_loss(op: Operation) -> State:
    """Compares vectors along the last dimension; one loss per triplet."""
    rows = aligned(op, [op.args[name] for name in ("anchor", "positive", "negative")])
    if rows.dim == -1:
        raise Coupled("triplet_margin_loss works along the batch dimension")
    if op.args["reduction"] == 0:
        return Rows(len(op.out) + rows.dim + 1, rows.outer, rows.inner)
    return _reduced(op.args["reduction"])


@rule("cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss")
def vector_loss(op: Operation) -> State:
    """Input of shape (samples, width) with labels per sample or per element; one loss per sample."""
    op.fixed("weight")
    names = [name for name in ("self", "input1", "input2", "target") if name in op.args]
    rows = together(op, *names)
    if rows.dim != 0 or len(op.shape(op.args[names[0]])) != 2:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows if op.args["reduction"] == 0 else _reduced(op.args["reduction"])


@rule("ctc_loss")
def ctc_loss(op: Operation) -> State:
    """One loss per sample, divided by its target length before the mean over samples."""
    probabilities = op.rows("log_probs")
    others = [op.rows(name) for name in ("targets", "input_lengths", "target_lengths")]
    if probabilities is None or probabilities.dim != 1 or len(op.shape(op.args["targets"])) != 2:
        raise Coupled("ctc_loss does not have (time, samples, classes) and (samples, length)")
    if any(each != Rows(0, probabilities.outer, probabilities.inner) for each in others):
        raise Coupled("ctc_loss combines different samples")
    return others[0] if op.args["reduction"] == 0 and others[0] else _reduced(op.args["reduction"])


CLASS_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")
"""Losses whose mean is over non-ignored labels."""


@rule(*CLASS_LOSSES)
def class_loss(op: Operation) -> State:
    """Classification loss; `rannd.graph.rows.analysis` decides whether the denominator of the mean can be an input.

    Dimension 1 of the input holds the classes. Label targets have all other dimensions, probability targets have all.
    """
    op.fixed("weight")
    rows, target = op.rows("self"), op.rows("target")
    ndim = len(op.shape(op.args["self"]))
    if rows is None or rows.dim == 1 or ndim < 2:
        raise Coupled(f"{op.name} does not have one prediction for each sample")
    labels = Rows(rows.dim - (rows.dim > 1), rows.outer, rows.inner)
    if target != (rows if len(op.shape(op.args["target"])) == ndim else labels):
        raise Coupled(f"{op.name} combines different samples")
    if op.args["reduction"] == 0:
        return labels
    return _reduced(op.args["reduction"])
