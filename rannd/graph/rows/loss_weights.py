"""Loss weights that make the losses of microbatches add up to the loss of the global batch.

A scalar that the model reduces over its samples (a loss) has to be weighted when the samples run in microbatches.
The weights are extra inputs of the graph, one number per microbatch, so that gradients are weighted, too.
With W ranks, n_r rows on rank r, N rows in all, and n_p rows in microbatch p of rank r:

    share of the rows        W n_p / N            for means over rows
    1 / denominator          W n_r / (N D_r)      for means over non-ignored labels (D_r of them on rank r), and for
                                                  other sums divided by a number D_r computed from the arguments
    label counts             N h_rc / (W n_r)     for means over labels with class weights (h_rc labels of class c on
                                                  rank r): times the class weights, they add up to the denominator

The global value is then the mean over ranks of the sum over microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from rannd.graph.fx.aliasing import base_name
from rannd.graph.fx.fx_names import graph_module
from rannd.graph.fx.sizes import is_number
from rannd.graph.fx.symbolic_values import TensorValue
from rannd.graph.fx.traced import Traced, arguments
from rannd.graph.rows.analysis import RowAnalysis
from rannd.graph.rows.global_reductions import classes_of
from rannd.graph.rows.rules.states import FIXED, WHOLE, Reduction, Rows, Scalar

ROWS_WEIGHT = "rannd_share_of_rows"
LABELS_WEIGHT = "rannd_label_weight_"


@dataclass(frozen=True)
class Result:
    """How an output of the call is assembled from the outputs of microbatches.

    `kind` is "rows" (concatenated along dimension `dim`), "global" (a scalar: summed over all microbatches of all
    ranks, divided by the number of ranks), "sum" (an integer: summed over the rank's microbatches), "first" (the same
    for all microbatches of a rank), or "number" (computed from the number of rows).
    """

    kind: str
    dim: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether each microbatch's value is sent to its rank; the others are summed once a call, or known there."""
        return self.kind not in ("number", "global")


def results(traced: Traced, analysis: RowAnalysis) -> tuple[Result, ...]:
    """Decide how each output of the model is assembled."""
    found = []
    for node in traced.results:
        state = analysis.states[node]
        value = node.meta["val"]
        if is_number(value):
            found.append(Result("number"))
        elif isinstance(state, Rows):
            found.append(Result("rows", state.dim))
        elif state is FIXED or (state is WHOLE and value.ndim > 0):
            found.append(Result("first"))
        else:
            found.append(Result("global" if value.is_floating_point() or value.is_complex() else "sum"))
    return tuple(found)


def keep_single_rows(analysis: RowAnalysis) -> None:
    """Make squeezes keep the batch dimension of a microbatch with one row.

    A mini-batch of one row keeps it, too, although the original model would drop it.
    """
    if analysis.coupled is not None:
        return  # mini-batches run unsplit, as in the original model
    for node in analysis.squeezed:
        named = arguments(node)
        shape = named["self"].meta["val"].shape
        dim = named.get("dim")
        dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
        operator = torch.ops.aten.squeeze_ if base_name(node) == "squeeze_" else torch.ops.aten.squeeze
        node.target = operator.dims
        node.args, node.kwargs = (named["self"], [each for each in dims if shape[each] == 1]), {}


def weigh(traced: Traced, analysis: RowAnalysis) -> tuple[str, ...]:
    """Insert the weights into the graph and return the names of the added placeholders."""
    graph = traced.graph
    weights: dict[str, Node] = {}
    last = traced.placeholders[-1]

    def weight(name: str, *shape: int) -> Node:
        nonlocal last
        if name not in weights:
            with graph.inserting_after(last):
                node = graph.placeholder(name)
            node.meta["val"] = TensorValue(torch.float64, shape)
            weights[name] = last = node
        return weights[name]

    def weight_like(value: object, name: str, dtype: torch.dtype, *shape: int) -> Node:
        """Insert a weight in a dtype, where `value` is."""
        host = isinstance(value, Node) and value.meta["val"].host
        if host:
            given = (weight(name, *shape), torch.device("cpu"), dtype)
            made = graph.call_function(torch.ops.aten.to.device, given)
        else:
            made = graph.call_function(torch.ops.aten.to.dtype, (weight(name, *shape), dtype))
        made.meta["val"] = TensorValue(dtype, shape, host)
        return made

    def scaled(value: Node | float, name: str, dtype: torch.dtype) -> Node:
        """Insert `value` times a weight, in the dtype of the value."""
        factor = weight_like(value, name, dtype)
        product = graph.call_function(torch.ops.aten.mul.Tensor, (factor, value))
        shape = value.meta["val"].shape if isinstance(value, Node) else ()
        product.meta["val"] = TensorValue(dtype, shape, factor.meta["val"].host)
        if isinstance(value, Node):
            product.args = (value, factor)
        return product

    def divided(loss: Node, name: str, classes: Node) -> Node:
        """Insert the division of a sum over labels by the sum of the class weights of all labels."""
        found = classes.meta["val"]
        counts = weight_like(classes, name, found.dtype, *found.shape)
        weighted = graph.call_function(torch.ops.aten.mul.Tensor, (counts, classes))
        weighted.meta["val"] = found
        total = graph.call_function(torch.ops.aten.sum.default, (weighted,))
        total.meta["val"] = TensorValue(found.dtype, (), found.host)
        mean = graph.call_function(torch.ops.aten.div.Tensor, (loss, total))
        mean.meta["val"] = loss.meta["val"]
        return mean

    for number, node in enumerate(analysis.masked if analysis.coupled is None else ()):
        if base_name(node) == "div":
            with graph.inserting_before(node):
                product = scaled(arguments(node)["self"], f"{LABELS_WEIGHT}{number}", node.meta["val"].dtype)
            node.replace_all_uses_with(product)
            graph.erase_node(node)
            continue
        _set_argument(node, "reduction", 2)
        value, classes = node.meta["val"], arguments(node).get("weight")
        with graph.inserting_before(node.next):
            if classes is None:
                mean = scaled(node, f"{LABELS_WEIGHT}{number}", value.dtype)
            else:
                mean = divided(node, f"{LABELS_WEIGHT}{number}", classes)
        node.replace_all_uses_with(mean)
        mean.update_arg(0, node)
    for node, name in analysis.weighted:
        value = node.meta["val"]
        with graph.inserting_before(node):
            product = scaled(arguments(node)[name], ROWS_WEIGHT, value.dtype)
        _set_argument(node, name, product)
    output = next(iter(reversed(graph.nodes)))
    outputs = list(traced.results)
    for place, node in enumerate(outputs):
        value = node.meta["val"]
        if analysis.states.get(node) == Scalar(Reduction.MEAN):
            with graph.inserting_before(output):
                outputs[place] = scaled(node, ROWS_WEIGHT, value.dtype)
    output.args = (tuple(outputs),)
    return tuple(weights)


def _set_argument(node: Node, name: str, value: object) -> None:
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index(name)
    if place < len(node.args):
        node.update_arg(place, value)  # type: ignore[arg-type]
    else:
        node.update_kwarg(name, value)  # type: ignore[arg-type]


def label_counts(traced: Traced, masked: tuple[Node, ...]) -> GraphModule | None:
    """Build a module that computes the denominator of each node in `masked` from the model's arguments.

    With class weights it returns the number of labels per class instead. It takes all rows of a rank, and must be
    built before the weights are inserted. None if `masked` is empty.
    """
    if not masked:
        return None
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in traced.placeholders:
        copies[node] = graph.placeholder(node.name)
    needed: set[Node] = set()
    stack = [arguments(node)["other" if base_name(node) == "div" else "target"] for node in masked]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    for node in traced.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, lambda source: copies[source])
    counts = []
    for node in masked:
        named = arguments(node)
        if base_name(node) == "div":
            counts.append(copies[named["other"]])
            continue
        target = copies[named["target"]]
        counted = graph.call_function(torch.ops.aten.ne.Scalar, (target, named["ignore_index"]))
        if named.get("weight") is None:
            counts.append(graph.call_function(torch.ops.aten.sum.default, (counted,)))
            continue
        classes = classes_of(node)
        assert classes is not None
        # Out-of-range labels are reported by the loss itself. Counted by sums, as the sizes of what selects or counts
        # values of a device would have to be read from it.
        clamped = graph.call_function(torch.ops.aten.clamp.default, (target, 0, classes))
        labels = graph.call_function(torch.ops.aten.where.ScalarOther, (counted, clamped, classes))
        flat = graph.call_function(torch.ops.aten.reshape.default, (labels, [-1]))
        ones = graph.call_function(torch.ops.aten.ones_like.default, (flat,))
        none = graph.call_function(torch.ops.aten.new_zeros.default, (flat, [classes + 1]))
        found = graph.call_function(torch.ops.aten.scatter_add.default, (none, 0, flat, ones))
        counts.append(graph.call_function(torch.ops.aten.slice.Tensor, (found, 0, 0, classes)))
    graph.output(tuple(counts))
    return graph_module(traced.root, graph, "LabelCounts")


def counted(counts: GraphModule | None, tensors: Sequence[torch.Tensor], share: float = 1.0) -> dict[str, torch.Tensor]:
    """Denominators of a rank by weight name, computed by `label_counts` from its arguments, times `share`.

    Each is a float64 tensor on the device: a single number, or one for each class.
    """
    if counts is None:
        return {}
    with torch.no_grad():
        found = counts(*(tensor.detach() for tensor in tensors))
    return {f"{LABELS_WEIGHT}{number}": count.double() * share for number, count in enumerate(found)}


def pieces_weights(
    names: tuple[str, ...],
    *,
    world: int,
    rows: int,
    rank_rows: int,
    total_rows: int,
    counts: Mapping[str, torch.Tensor],
    device: torch.device,
) -> tuple[torch.Tensor, ...]:
    """The weights, float64 on `device`, of a microbatch of `rows` rows; `counts` has the rank's by weight name.

    A mean over no labels is NaN, as in torch.
    """
    values: list[torch.Tensor] = []
    share = world * rank_rows / total_rows
    for name in names:
        if name == ROWS_WEIGHT:
            values.append(torch.full((), world * rows / total_rows, dtype=torch.float64, device=device))
            continue
        count = counts[name].to(device)
        if count.ndim:
            values.append(count / share)
        else:
            # Not `share / count`: torch multiplies by the reciprocal then.
            values.append(torch.where(count == 0, float("nan"), torch.full_like(count, share) / count))
    return tuple(values)
