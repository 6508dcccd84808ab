from __future__ import annotations

from hypothesis import given
from plan_graphs import GraphBuilder, task_graphs

from rannd.graph.fx.ir import TaskGraph
from rannd.plan.blocks.atoms import make_atoms


def test_an_op_between_two_ops_of_a_group_joins_them() -> None:
    builder = GraphBuilder()
    first = builder.op([builder.input()], group=7)
    between = builder.op([first])
    builder.op([between], group=7)
    builder.op([first])
    assert make_atoms(builder.build()) == ((0, 1, 2), (3,))


def test_order_follows_the_program_where_the_graph_leaves_a_choice() -> None:
    builder = GraphBuilder()
    given_value = builder.input()
    left = builder.op([given_value])
    right = builder.op([given_value])
    builder.op([left])
    builder.op([right])
    assert make_atoms(builder.build()) == ((0,), (1,), (2,), (3,))


def test_a_group_that_ends_late_moves_behind_what_it_reads() -> None:
    builder = GraphBuilder()
    given_value = builder.input()
    builder.op([given_value], group=1)
    other = builder.op([given_value])
    builder.op([other], group=1)
    assert make_atoms(builder.build()) == ((1,), (0, 2))


def test_a_graph_without_ops_has_no_atoms() -> None:
    assert make_atoms(GraphBuilder().build()) == ()


@given(task_graphs(max_ops=14))
def test_atoms_partition_the_ops_keep_groups_and_are_ordered(graph: TaskGraph) -> None:
    atoms = make_atoms(graph)
    place = {op: index for index, atom in enumerate(atoms) for op in atom}
    assert sorted(place) == list(range(len(graph.ops)))
    assert sum(len(atom) for atom in atoms) == len(graph.ops)
    for index, op in enumerate(graph.ops):
        assert all(place[index] == place[other] for other, each in enumerate(graph.ops) if each.group == op.group)
        for value in op.inputs:
            producer = graph.values[value].producer
            assert producer < 0 or place[producer] <= place[index]


@given(task_graphs(max_ops=14, groups=False))
def test_without_groups_every_op_is_an_atom(graph: TaskGraph) -> None:
    assert make_atoms(graph) == tuple((op,) for op in range(len(graph.ops)))
