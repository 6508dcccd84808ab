"""The grammar of a cached trace, checked whole before anything is built from it (docs/protocol.md, "Cached traces").

A cached trace may come from another machine. What it holds is data: names that end up in generated code are
identifiers, functions are those of fixed lists, operators are those of torch that compute tensors or those that the
program itself has registered, and all sizes are bounded.

Here is the whole; `graph_grammar`, `operator_grammar`, `size_grammar`, `leaf_grammar` and `container_text` have the
parts.
"""

from __future__ import annotations

import math
from typing import Any, Final

from rannd.graph.stored.container_text import check_container
from rannd.graph.stored.encoding import DEVICES, DTYPES
from rannd.graph.stored.grammar_rules import (
    MOST_DIMENSIONS,
    Rule,
    broken,
    dtype,
    each,
    mapping,
    maybe,
    natural,
    naturals,
    record,
    text,
    texts,
    truth,
)
from rannd.graph.stored.graph_grammar import GraphRule, path, places
from rannd.graph.stored.leaf_grammar import leaf_call
from rannd.graph.stored.size_grammar import Sizes

MOST_GRAPH_BYTES: Final = 16 * 2**20
"""Size of a trace without the values of its constants."""
MOST_CONSTANT_BYTES: Final = 64 * 2**20
"""Size of the values of all constants of a trace."""


def check_trace(data: Any) -> None:
    """Check a decoded trace, without the values of its constants."""
    sizes = Sizes()

    def graph(value: Any) -> None:
        GraphRule(sizes, leaves=bool(data["leaves"])).check(value, data["attributes"])

    def decisions(value: Any) -> None:
        record(lambda graph: None, mapping(path, _tensor), each(truth), texts)(value)
        GraphRule(sizes).check(value[0], value[1])

    fields: dict[str, Rule] = {
        "attributes": mapping(path, text),
        "changes": texts,
        "constants": mapping(text, _tensor),
        "decisions": maybe(decisions),
        "fixed_rows": maybe(natural),
        "format": natural,
        "graph": graph,
        "holes": naturals,
        "leaves": maybe(mapping(text, leaf_call(sizes))),
        "outputs": record(check_container, places, naturals, naturals),
        "record": texts,
        "whole": naturals,
    }
    if not isinstance(data, dict) or data.keys() != fields.keys():
        broken("the fields", data)
    for name, rule in fields.items():
        rule(data[name])


def _tensor(value: Any) -> None:
    """A constant: its dtype, its shape, as many bytes as they take, and the type of its device."""
    record(dtype, naturals, lambda raw: None, text)(value)
    kind, shape, raw, device = value
    if device == "meta" or device not in DEVICES:
        broken("the device of a constant", device)
    if len(shape) > MOST_DIMENSIONS or math.prod(size or 1 for size in shape) >= 2**48:
        broken("the shape of a constant", shape)
    if type(raw) is not bytes or len(raw) != math.prod(shape) * DTYPES[kind].itemsize:
        broken(f"the bytes of a constant of {shape} {kind}", raw)
