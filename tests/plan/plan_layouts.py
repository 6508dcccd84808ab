"""Random layouts: unequal replicas, worlds they do not divide, skip edges, edges without gradients, tied weights."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from rannd.plan.schedule.program import Layout


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
