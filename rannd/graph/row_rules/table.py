"""All rules, by the name of the operator without its overload: reading the modules of rules registers them."""

from __future__ import annotations

from rannd.graph.row_rules import elementwise as elementwise
from rannd.graph.row_rules import indexing as indexing
from rannd.graph.row_rules import layers as layers
from rannd.graph.row_rules import losses as losses
from rannd.graph.row_rules import parts as parts
from rannd.graph.row_rules import products as products
from rannd.graph.row_rules import reductions as reductions
from rannd.graph.row_rules import routing as routing
from rannd.graph.row_rules import shapes as shapes
from rannd.graph.row_rules.operation import RULES as RULES
