"""``dump_graph``: writes each graph with its blocks and stages to files."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from rannd import log
from rannd.config import Config
from rannd.graph.dump import drawing, write
from rannd.graph.model import ModelGraph
from rannd.plan.blocks.blocks import make_blocks
from rannd.plan.blocks.repeated_layers import parts_of
from rannd.plan.deployment import Deployment
from rannd.plan.plan_options import PlanOptions


def dump(config: Config, graph: ModelGraph, deployment: Deployment, stage_of: Mapping[Node, int]) -> None:
    """Write `graph` with its blocks and stages to ``<dump_graph_prefix><hash>.json`` and ``.dot``.

    UsageError if a file cannot be written.
    """
    parts = parts_of(graph.task, compiled=config.compile_stages != "off")
    blocks = make_blocks(parts, PlanOptions.of(config), world=len(deployment.slots)) if graph.task.ops else ()
    drawn = drawing(
        graph,
        blocks=[block.ops for block in blocks],
        stages=[(stage.name, stage.slots) for stage in deployment.stages],
        stage_of=stage_of,
    )
    for file in write(drawn, config.dump_graph_prefix):
        log.get("RaNNCModule").info("Graph written to %s", file)
