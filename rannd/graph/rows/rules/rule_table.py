"""All rules, by the name of the operator without its overload."""

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
"""The modules of rules: importing one registers its rules. A new module is added here."""
