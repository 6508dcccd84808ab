"""Table of all propagation rules, keyed by operator name without overload."""

from __future__ import annotations

from rannd.graph.rows.rules import (
    elementwise,
    indexing,
    layers,
    loss_rules,
    moe_routing,
    parts,
    products,
    reductions,
    shapes,
)
from rannd.graph.rows.rules.operation import RULES as RULES

MODULES = (elementwise, indexing, layers, loss_rules, moe_routing, parts, products, reductions, shapes)
"""Modules that register rules when imported; add new ones here."""
