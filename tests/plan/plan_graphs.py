"""Small task graphs for the planner's tests: chains, layers, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from hypothesis import strategies as st

from rannd.graph.fx.ir import Op, Param, Size, TaskGraph, Value
from rannd.profile.costs import BlockCost, CostTable, LinkCost

LINK = LinkCost(p2p_latency_us=10, p2p_bytes_per_us=1000, allreduce_latency_us=20, allreduce_bytes_per_us=500)


class GraphBuilder:
    """Adds ops one by one; a value is named by the op that makes it."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.params: list[Param] = []

    def input(self, size: float = 100.0, *, grad: bool = False) -> int:
        return self._value(-1, size, grad, False)

    def param(self, size: int, *, trainable: bool = True) -> int:
        self.params.append(Param(f"p{len(self.params)}", size, trainable))
        return len(self.params) - 1

    def op(
        self,
        inputs: Sequence[int],
        *,
        params: Sequence[int] = (),
        size: float = 100.0,
        flops: float = 1000.0,
        group: int | None = None,
        grad: bool = True,
        output: bool = False,
        target: str = "aten::linear",
        module: str = "",
        opaque: str = "",
    ) -> int:
        """The value the new op makes; `size` bytes and `flops` for each row."""
        index = len(self.ops)
        value = self._value(index, size, grad, output)
        own = 1_000_000 + index if group is None else group
        self.ops.append(
            Op(
                f"op{index}",
                target,
                f"of {target}",
                tuple(inputs),
                (value,),
                tuple(params),
                Size(0, flops),
                own,
                module,
                opaque=opaque,
            )
        )
        return value

    def _value(self, producer: int, size: float, grad: bool, output: bool) -> int:
        self.values.append(Value(f"v{len(self.values)}", producer, Size(0, size), grad, output))
        return len(self.values) - 1

    def build(self, *, rows_coupled: bool = False, unused: Sequence[int] = ()) -> TaskGraph:
        return TaskGraph("hash", tuple(self.ops), tuple(self.values), tuple(self.params), rows_coupled, tuple(unused))


def chain(length: int, *, param: int = 1000, size: float = 100.0) -> TaskGraph:
    """Linear layers in a row, as in the tutorial."""
    builder = GraphBuilder()
    value = builder.input(size)
    for index in range(length):
        value = builder.op(
            [value], params=[builder.param(param)], size=size, output=index == length - 1, module=f"layers.{index}"
        )
    return builder.build()


def transformer(layers: int) -> TaskGraph:
    """Residual attention and MLP layers with a tied head: 15 ops a layer."""
    builder = GraphBuilder()
    tokens = builder.input(8)
    embedding = builder.param(40_000)
    hidden = builder.op([tokens], params=[embedding], target="aten::embedding", flops=0, module="embed")
    for layer in range(layers):
        at = f"layer.{layer}"
        norm = builder.op([hidden], params=[builder.param(80)], target="aten::layer_norm", flops=50, module=at)
        parts = [builder.op([norm], params=[builder.param(10_000)], flops=2500, module=at) for _ in range(3)]
        parts = [builder.op([part], target="aten::transpose", flops=0, module=at) for part in parts]
        score = builder.op(parts[:2], size=400, target="aten::matmul", flops=1000, module=at)
        score = builder.op([score], size=400, target="aten::softmax", flops=300, module=at)
        mixed = builder.op([score, parts[2]], target="aten::matmul", flops=1000, module=at)
        mixed = builder.op([mixed], params=[builder.param(10_000)], flops=2500, module=at)
        hidden = builder.op([hidden, mixed], target="aten::add", flops=25, module=at)
        norm = builder.op([hidden], params=[builder.param(80)], target="aten::layer_norm", flops=50, module=at)
        up = builder.op([norm], params=[builder.param(40_000)], size=400, flops=10_000, module=at)
        up = builder.op([up], size=400, target="aten::gelu", flops=400, module=at)
        down = builder.op([up], params=[builder.param(40_000)], flops=10_000, module=at)
        hidden = builder.op([hidden, down], target="aten::add", flops=25, module=at)
    norm = builder.op([hidden], params=[builder.param(80)], target="aten::layer_norm", flops=50, module="norm")
    logits = builder.op([norm], params=[embedding], size=1600, flops=20_000, module="head")
    builder.op([logits], size=0.5, target="aten::nll_loss", flops=10, output=True, module="loss")
    return builder.build()


@st.composite
def task_graphs(draw: st.DrawFn, *, max_ops: int = 10, groups: bool = True) -> TaskGraph:
    """Random graphs: skip edges, tied and frozen parameters, several inputs and outputs, groups."""
    builder = GraphBuilder()
    sizes = st.integers(0, 5000).map(float)
    values = [builder.input(draw(sizes), grad=draw(st.booleans())) for _ in range(draw(st.integers(1, 2)))]
    params = [
        builder.param(draw(st.integers(0, 20_000)), trainable=draw(st.booleans()))
        for _ in range(draw(st.integers(1, 6)))
    ]
    count = draw(st.integers(1, max_ops))
    for index in range(count):
        reads = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
        values.append(
            builder.op(
                reads,
                params=draw(st.lists(st.sampled_from(range(len(params))), max_size=2, unique=True)),
                size=draw(sizes),
                flops=draw(sizes),
                group=draw(st.integers(0, 8)) if groups and draw(st.booleans()) else None,
                grad=draw(st.booleans()),
                output=index == count - 1 or draw(st.booleans()),
            )
        )
    return builder.build()


def costs_for(blocks: int, *, forward: float = 100.0, backward: float = 200.0, activation: float = 1000.0) -> CostTable:
    """Every block costs the same for each row."""
    one = BlockCost(Size(0, forward), Size(0, backward), Size(0, activation))
    return CostTable((one,) * blocks, LINK)


def random_graph(random: Random, ops: int) -> TaskGraph:
    """Mostly a chain, with skip edges, tied and frozen parameters, uneven ops, inputs that want gradients."""
    builder = GraphBuilder()
    small, large = (lambda: random.choice([0, 10, 100])), (lambda: random.choice([0, 10_000, 30_000, 100_000]))
    inputs = [builder.input(small(), grad=random.random() < 0.3) for _ in range(random.choice([1, 1, 2]))]
    tied = [builder.param(large()) for _ in range(random.choice([0, 0, 1, 2]))]
    values = [inputs[0]]
    for index in range(ops):
        reads = {values[-1]}
        if random.random() < 0.3:
            reads.add(random.choice(values + inputs))
        params = [builder.param(large(), trainable=random.random() < 0.9)] if random.random() < 0.8 else []
        if tied and random.random() < 0.3:
            params.append(random.choice(tied))
        output = index == ops - 1 or random.random() < 0.1
        grad = random.random() < 0.9
        values.append(builder.op(sorted(reads), params=params, size=small(), grad=grad, output=output))
    unused = [builder.param(large())] if random.random() < 0.1 else []
    return builder.build(rows_coupled=random.random() < 0.1, unused=unused)


def random_costs(random: Random, blocks: int) -> CostTable:
    """Uneven blocks on links of which the all-reduce is mostly the slower one, so that pipelines are worth while."""

    def size(most: int) -> Size:
        return Size(random.randint(0, most) if random.random() < 0.7 else 0.0, random.randint(0, most))

    link = LinkCost(
        p2p_latency_us=random.choice([0, 5, 100]),
        p2p_bytes_per_us=random.choice([1.0, 10.0, 1000.0]),
        allreduce_latency_us=random.choice([0, 100]),
        allreduce_bytes_per_us=random.choice([0.5, 1.0, 3.0, 100.0]),
    )
    slower = LinkCost(
        p2p_latency_us=link.p2p_latency_us * 2,
        p2p_bytes_per_us=link.p2p_bytes_per_us / 3,
        allreduce_latency_us=link.allreduce_latency_us * 2,
        allreduce_bytes_per_us=link.allreduce_bytes_per_us / 5,
    )

    def block(waits: float) -> BlockCost:
        forward, backward, kept = size(1000), size(random.choice([100, 3000])), size(10_000)
        weight = Size(backward.c0 * waits, backward.c1 * waits)
        return BlockCost(forward, backward, kept, weight, add_us=200 * waits)

    return CostTable(
        tuple(block((0.5, 0.3, 0.0, 0.8)[index % 4]) for index in range(blocks)),
        link,
        random.choice([None, slower]),
    )
