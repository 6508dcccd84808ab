"""Layers of networks that treat each sample alone: convolutions, pools, norms, recurrent ones."""

from __future__ import annotations

from torch.fx import Node

from rannd.graph.row_rules.operation import Operation, away, everywhere, leaves, rule, together
from rannd.graph.row_states import FIXED, Coupled, Rows, State


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(op: Operation) -> State:
    """(samples, channels, place ...)."""
    op.fixed("weight", "bias")
    rows = op.rows("input")
    ndim = len(op.shape(op.args["input"]))
    if rows is None or rows.dim != 0 or ndim != len(op.shape(op.args["weight"])):
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("group_norm", "channel_shuffle", "native_channel_shuffle")
def channels(op: Operation) -> State:
    """(samples, channels, ...): channels in groups."""
    op.fixed("weight", "bias")
    rows = op.rows("input" if "input" in op.args else "self")
    if rows is None or rows.dim != 0:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    return rows


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def layer_norm(op: Operation) -> State:
    op.fixed("weight", "bias")
    ndim = len(op.shape(op.args["input"]))
    rows = away(op, "input", set(range(ndim - len(op.args["normalized_shape"]), ndim)))
    return everywhere(op, rows)


@rule("batch_norm")
def batch_norm(op: Operation) -> State:
    if op.args["training"]:
        raise Coupled("batch_norm normalises over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return away(op, "input", {1})


@rule("instance_norm")
def instance_norm(op: Operation) -> State:
    if isinstance(op.args.get("running_mean"), Node) and op.args["use_input_stats"]:
        raise Coupled("instance_norm keeps statistics over the batch")
    op.fixed("weight", "bias", "running_mean", "running_var")
    return away(op, "input", set(range(1, len(op.out))))


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(op: Operation) -> State:
    """(output, states ...); states are (layers, batch, width)."""
    if "batch_first" not in op.args:
        raise Coupled(f"{op.name} of packed sequences is not followed")
    rows = op.rows("input")
    first = 0 if op.args["batch_first"] else 1
    if rows is None or rows.dim != first or len(op.shape(op.args["input"])) != 3:
        raise Coupled(f"{op.name} does not have the samples where it expects the batch")
    op.fixed("params")
    for state in leaves(op.args["hx"]):
        found = op.as_rows(state)
        if found is not None and (found.dim, found.outer, found.inner) != (1, rows.outer, rows.inner):
            raise Coupled(f"{op.name} has a state of other samples")
    return (rows, *(Rows(1, rows.outer, rows.inner),) * (len(op.node.meta["val"]) - 1))


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(op: Operation) -> State:
    """One step: (samples, width) and a state of the same layout."""
    op.fixed("w_ih", "w_hh", "b_ih", "b_hh")
    rows = op.rows("input")
    if rows is None or rows.dim != 0 or any(op.as_rows(state) != rows for state in leaves(op.args["hx"])):
        raise Coupled(f"{op.name} combines different samples")
    return everywhere(op, rows)


@rule("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
def fused_attention(op: Operation) -> State:
    """(samples, time, width); the mask is one for all (time, time), or has the samples in front."""
    tensors = ("src",) if "src" in op.args else ("query", "key", "value")
    op.fixed(*(name for name in op.args if name not in (*tensors, "mask")))
    rows, mask = together(op, *tensors), op.args.get("mask")
    if rows != Rows(0, 1, 1) or len(op.shape(op.args[tensors[0]])) != 3:
        raise Coupled(f"{op.name} does not have the samples in dimension 0")
    if mask is not None and op.state(mask) is not FIXED and op.rows("mask") != rows:
        raise Coupled(f"{op.name} combines different samples")
    return everywhere(op, rows)
