"""All rules, by the name of the operator without its overload: reading the modules of rules registers them."""

from __future__ import annotations

from rannd.graph.rows.rules.operation import RULES as RULES
