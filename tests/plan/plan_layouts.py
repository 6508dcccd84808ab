"""Random layouts: unequal replicas, worlds they do not divide, skip edges, edges without gradients, tied weights.

Also of several stages per slot.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from hypothesis import strategies as st

from rannd.plan.schedule.program import Layout, Program
from rannd.plan.schedule.virtual_stages import interleaved_1f1b, round_robin, v_shape, zero_bubble_v

Make = Callable[[Layout], Program]


@st.composite
def layouts(draw: st.DrawFn, *, max_world: int = 6) -> Layout:
    world = draw(st.integers(1, max_world))
    stages = draw(st.integers(1, world))
    slots = draw(st.permutations(range(world)))
    cuts = sorted(draw(st.permutations(range(1, world)))[: stages - 1])
    bounds = [0, *cuts, world]
    possible = [(src, dst) for src in range(-1, stages) for dst in range(src + 1, stages + 1)]
    possible.remove((-1, stages))  # an input handed back as an output never leaves its rank
    edges = draw(st.lists(st.sampled_from(possible), unique=True))
    grads = draw(st.lists(st.sampled_from(edges), unique=True)) if edges else []
    sets = st.sets(st.integers(0, stages - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    tied = draw(st.lists(sets, max_size=2, unique=True)) if stages > 1 else []
    return Layout(
        world=world,
        microbatches=draw(st.integers(1, 4)),
        stages=tuple(tuple(slots[start:end]) for start, end in pairwise(bounds)),
        edges=tuple(sorted(edges)),
        grad_edges=tuple(sorted(grads)),
        tied=tuple(sorted(tied)),
    )


@st.composite
def interleaved(draw: st.DrawFn, *, asked: bool = False) -> tuple[Layout, Make]:
    """Layouts with several stages per slot, and a schedule for them. `asked`: outputs may have gradients."""
    positions, replicas = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    slots = draw(st.permutations(range(positions * replicas)))
    homes = tuple(tuple(slots[at * replicas : (at + 1) * replicas]) for at in range(positions))
    v = draw(st.booleans())
    stages = v_shape(homes) if v else round_robin(homes, draw(st.integers(2, 3)))
    last = len(stages)
    possible = [(src, dst) for src in range(-1, last) for dst in range(src + 1, last + 1)]
    possible.remove((-1, last))
    edges = sorted(draw(st.lists(st.sampled_from(possible), unique=True)))
    inner = [edge for edge in edges if edge[1] < last or asked]
    grads = sorted(draw(st.lists(st.sampled_from(inner), unique=True))) if inner else []
    sets = st.sets(st.integers(0, last - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    tied = tuple(sorted(draw(st.lists(sets, max_size=2, unique=True))))
    layout = Layout(len(slots), draw(st.integers(1, 3)), stages, tuple(edges), tuple(grads), tied)
    if v:
        split = draw(st.sets(st.integers(0, last - 1)))
        return layout, lambda part: zero_bubble_v(part, split)
    ahead = draw(st.integers(0, 3))
    return layout, lambda part: interleaved_1f1b(part, ahead=ahead)
