"""Find code for which an export succeeds but its graph is wrong; the module has to become a leaf."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from rannd.graph.fx.aliasing import Aliases, written
from rannd.graph.fx.leaf_op import NAME as LEAF
from rannd.graph.fx.leaf_op import call_of
from rannd.graph.fx.traced import Traced, attribute, operator_name
from rannd.graph.tracing.leaf_recorder import NotALeaf

NESTING = ("_vmap_increment", "_grad_increment", "_jvp_increment", "functorch")
"""Substrings in the names of operators that start a torch.func transform."""
SPARSE = "sparse"
"""Substring in the names of operators that make or take a sparse tensor."""


def unshown(traced: Traced) -> NotALeaf | None:
    """Find a module whose code uses something that a graph cannot contain: a sparse tensor, `.data`, a generator."""
    for node in traced.graph.nodes:
        if SPARSE in operator_name(node.target):
            return NotALeaf(node.meta.get("module", ""), "its code makes a sparse tensor, which a graph cannot contain")
        if any(word in operator_name(node.target) for word in NESTING):
            return NotALeaf(node.meta.get("module", ""), "its code uses torch.func, which a graph cannot contain")
        if node.op != "get_attr" or not node.users:
            continue
        value = attribute(traced.root, str(node.target))
        module = next(iter(node.users)).meta.get("module", "")
        if isinstance(value, FakeTensor):
            return NotALeaf(module, "its code reads .data of a tensor that has no values during tracing")
        if not isinstance(value, (torch.Tensor, GraphModule)):
            return NotALeaf(module, f"its code passes a {type(value).__qualname__} to an operator")
    return None


def written_constant(traced: Traced) -> NotALeaf | None:
    """Find a module that writes into a tensor which is neither a parameter nor a buffer: a graph has its first values.

    As one operator it writes into its own tensor, once for each mini-batch that its rank computes.
    """
    if not traced.constants:
        return None
    sharing = Aliases(traced)
    held = {sharing.find(node) for node, name in traced.attributes.items() if name in traced.constants}
    for node in traced.graph.nodes:
        if any(sharing.find(target) in held for target in written(traced, node)):
            return NotALeaf(
                node.meta.get("module", ""),
                "its code writes in place into a tensor that is no buffer: register_buffer lets a graph do this",
            )
    return None


def written_later(traced: Traced) -> NotALeaf | None:
    """Find a leaf whose results alias other tensors, and one of whose arguments or results is written in place."""
    if traced.leaves is None:
        return None
    sharing = Aliases(traced)
    targets = {
        sharing.find(target)
        for node in traced.graph.nodes
        if operator_name(node.target) != LEAF
        for target in written(traced, node)
    }
    for node in traced.graph.nodes:
        if node.op == "call_function" and operator_name(node.target) == LEAF:
            _, call = call_of(node.args[0])
            if call.shares and any(sharing.find(each) in targets for each in (*node.users, *node.all_input_nodes)):
                return NotALeaf(call.path, "its results share memory that is written in place")
    return None
