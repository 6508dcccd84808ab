"""Measuring parts: costs make sense, and nothing of the user's is touched."""

from __future__ import annotations

import functools
import gc
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.fx import Node

from rannd import log
from rannd.device import caches, timing
from rannd.device.timing import Sample
from rannd.errors import ProfileError
from rannd.graph.call.signature import Mode, classify, flatten_call
from rannd.graph.fx.ir import Size
from rannd.graph.model import ModelGraph, build
from rannd.graph.partition.block_hash import block_hashes, crossing
from rannd.graph.partition.cut import Part, extract
from rannd.profile import block_costs
from rannd.profile import measure as measuring
from rannd.profile.block_costs import (
    ALONE,
    FEWEST_TURNS,
    MOST_TURNS,
    Ranks,
    block_part,
    given_in_stages,
    measure_alone,
    measure_missing,
)
from rannd.profile.costs import BlockCost
from rannd.profile.measure import ProfiledPart, ProfileInputs, finish
from rannd.profile.points import Measured, is_plausible
from rannd.profile.samples import RowSamples, Turn

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.table = nn.Embedding(7, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5))
            for _ in range(layers)
        )

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        a = self.table(ids) * scale[:, None]
        for layer in self.layers:
            a = layer(a)
        return a


def graph_of(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[ModelGraph, ProfileInputs]:
    call = flatten_call(args, kwargs)
    signature = classify(call, Mode.current(model.training), [call.shapes()])
    graph = build(model, signature, list(call.tensors), CPU)
    arguments = {
        node: (leaf, spec.batch)
        for node, leaf, spec in zip(graph.traced.placeholders, call.tensors, signature.tensors, strict=False)
    }
    state: dict[str, Tensor] = {
        **graph.traced.constants,
        **dict(model.named_buffers()),
        **dict(model.named_parameters()),
    }
    return graph, ProfileInputs(arguments, frozenset(graph.placement.requires_grad), state, CPU)


def whole(graph: ModelGraph) -> Part:
    return extract(graph.traced, graph.placement, set(graph.placement.placed), "Whole")


def small_graph(rows: int = 4) -> tuple[Model, ModelGraph, ProfileInputs]:
    model = Model()
    return model, *graph_of(model, torch.randint(0, 7, (rows,)), torch.rand(rows))


def test_nothing_of_the_users_is_touched() -> None:
    model, graph, sample = small_graph()
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), 3.0)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    measure_alone(whole(graph), sample, (2, 4))
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    first, *others = model.parameters()
    assert first.grad is not None
    assert first.grad.eq(3.0).all()
    assert all(parameter.grad is None for parameter in others)


def test_costs_are_positive_and_grow_with_the_rows() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    graph, sample = graph_of(model, torch.randn(8, 64))
    cost = measure_alone(whole(graph), sample, (8, 64)).cost(64)
    for size in (cost.forward_us, cost.backward_us):
        assert size.at(64) > 0
        assert size.at(1) >= 0
        assert size.at(1000) >= size.at(10)
    assert cost.activation_bytes.at(8) >= 8 * (64 + 256) * 4
    assert cost.activation_bytes.at(64) == 8 * cost.activation_bytes.at(8)


@pytest.mark.long
def test_adding_gradients_takes_a_time_that_grows_with_the_parameters_alone() -> None:
    small, large = (
        min(measure_alone(whole(graph), sample, (4,)).cost(4).add_us for _ in range(3))  # others use the machine, too
        for graph, sample in (graph_of(nn.Linear(width, 2048), torch.randn(4, width)) for width in (16, 2048))
    )
    assert 0 < 5 * small < large


class HostQueue:
    """The CPU as if it worked behind the host: everything is done when it is issued."""

    def __init__(self, device: torch.device) -> None:
        pass

    def host_us(self) -> float:
        return time.perf_counter() * 1e6

    mark = host_us

    def between_us(self, first: float, last: float) -> float:
        return last - first

    def work(self) -> None:
        time.sleep(1e-3)

    def wait(self) -> None:
        pass


def test_parts_are_measured_in_the_same_way_on_a_device_with_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (timing, measuring):
        monkeypatch.setattr(module, "is_accelerator", lambda device: True)
    monkeypatch.setattr(timing, "EventQueue", HostQueue)
    monkeypatch.setattr(timing, "WARM_US", 0.0)
    monkeypatch.setattr(caches, "eviction_bytes", lambda device, small: caches.LEAST)
    model, graph, sample = small_graph()
    random = torch.get_rng_state()
    try:
        found = measure_alone(whole(graph), sample, (2, 4))
        assert torch.equal(torch.get_rng_state(), random)
        assert [point.rows for point in found.points] == [2, 4]
        assert is_plausible(found)
        for point in found.points:
            assert min(point.forward_us, point.backward_us, found.add_us) > 0
        assert all(parameter.grad is None for parameter in model.parameters())
        # Integer inputs were brought there once for each number of rows; a part may write into what it gets.
        ids = graph.traced.placeholders[0]
        given, _ = sample.arguments[ids]
        sample.value(ids, 4).zero_()
        assert torch.equal(sample.value(ids, 4), given)
        assert torch.equal(sample.value(ids, 2), given[:2])
        layer = nn.Linear(8, 8).requires_grad_(False)
        graph, sample = graph_of(layer, torch.randn(4, 8))
        assert measure_alone(whole(graph), sample, (4,)).points[0].backward_us == 0
    finally:
        finish()


def test_what_autograd_keeps_of_a_border_is_told() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    graph, sample = graph_of(model, torch.randn(4, 8))
    values = graph.task.values
    ops = [number for number, op in enumerate(graph.task.ops) if op.target in ("aten::linear", "aten::tanh")][:2]
    (border,) = crossing(graph.task, [ops])
    assert [values[value].producer for value in border] == [-1, ops[1]]
    names = [values[value].name for value in border]
    part = block_part(graph, ops)
    assert measure_alone(part, sample, (4,), names).kept == (0, 1), "the linear's input, and what tanh makes"


class Masked(nn.Module):
    """Layers that read one mask, which is computed from an argument alone; the last one reads shifted labels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        mask = (ids.cumsum(1) % 3 == 0).logical_not().float()
        for layer in self.layers:
            x = layer(x) * mask
        return (x - ids.roll(1, 1).float()).square().mean()


def test_what_a_stage_computes_once_for_all_its_parts_is_not_measured_with_each() -> None:
    graph, sample = graph_of(Masked(), torch.rand(4, 8), torch.randint(9, (4, 8)))
    ops = graph.task.ops
    given = given_in_stages(graph, [[number] for number in range(len(ops))])
    assert {node.target.name() for node in given} == {"aten::eq.Scalar", "aten::logical_not", "aten::to.dtype"}, (
        "what are integers may be an index elsewhere"
    )

    def runs(number: int, given: Set[Node]) -> str:
        part = block_part(graph, [number], given=given)
        assert measure_alone(part, sample, (4,)).points[0].rows == 4
        code: str = part.module.code
        return code

    masked = [number for number in range(len(ops)) if "cumsum" in runs(number, frozenset())]
    assert [ops[number].target for number in masked] == ["aten::mul.Tensor"] * 3
    assert not any("cumsum" in runs(number, given) for number in masked)
    (only,) = [number for number in range(len(ops)) if "roll" in runs(number, given)]
    assert ops[only].target == "aten::sub.Tensor", "no other part would compute the labels"
    alone = given_in_stages(graph, [[*range(len(ops))]])
    assert not alone, "a single part computes everything itself"


def test_frozen_models_have_no_backward() -> None:
    model = nn.Linear(8, 8).requires_grad_(False)
    graph, sample = graph_of(model, torch.randn(4, 8))
    cost = measure_alone(whole(graph), sample, (4,)).cost(4)
    assert cost.add_us == 0
    assert cost.backward_us.at(4) == 0
    assert cost.activation_bytes.at(4) == 0


def test_gradients_of_parameters_are_a_part_of_the_backward() -> None:
    def cost(model: nn.Module, part: slice) -> BlockCost:
        graph, sample = graph_of(model, torch.randn(256, 512))
        ops = [[number] for number in range(len(graph.task.ops))]
        return measure_alone(block_part(graph, ops[part][0]), sample, (64, 256)).cost(256)

    layers = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))

    def share(model: nn.Module, part: int) -> float:
        found = cost(model, slice(part, part + 1))
        return found.weight_us.at(256) / found.backward_us.at(256)

    # Other work on the machine may fall into one of the measurements.
    assert any(share(layers, 0) > 0.7 for _ in range(20)), "nobody wants a gradient of the model's input"
    # Two products, one of them the parameter's.
    assert any(0.1 < share(layers, 1) < 0.9 for _ in range(20))
    normed = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512))
    assert share(normed, 1) == 0, "what does not separate is not delayed"
    layers[1].requires_grad_(False)
    assert cost(layers, slice(1, 2)).weight_us.at(256) == 0


def test_what_can_be_delayed_is_known_although_noise_hides_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def noise(*args: Any, **options: Any) -> list[list[Sample]]:
        return [[Sample(50.0) for _ in each] for each in timing.spans(*args, **options)]

    monkeypatch.setattr(measuring, "spans", noise)
    graph, sample = graph_of(nn.Linear(8, 8), torch.randn(16, 8))
    cost = measure_alone(whole(graph), sample, (4, 16)).cost(16)
    for rows in (1, 4, 16):
        assert 0 < cost.weight_us.at(rows) <= cost.backward_us.at(rows)


class Square(nn.Module):
    """64 MiB a row of 4,096 numbers, 16 MiB a row of 2,048."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :, None] * x[:, None, :]).tanh().sum((1, 2))


def _measure_with_little_memory(_: int, file: str, rows: tuple[int, ...], width: int, mebibytes: int) -> None:
    torch.set_num_threads(1)
    graph, sample = graph_of(Square(), torch.rand(2, width).requires_grad_())
    measure_alone(whole(graph), sample, (1,))  # what the first run loads and keeps
    there = psutil.Process().memory_info().vms + (mebibytes << 20)
    resource.setrlimit(resource.RLIMIT_AS, (there, there))
    try:
        told = msgspec.msgpack.encode(measure_alone(whole(graph), sample, rows))
    except ProfileError as exc:
        told = str(exc).encode()
    Path(file).write_bytes(told)


@pytest.mark.parametrize(
    ("rows", "few", "many"),
    [
        pytest.param((2, 64), 4, 31, marks=pytest.mark.long),
        *(pytest.param(rows, 4, 31, marks=pytest.mark.full) for rows in ((64,), (64, 256))),
    ],
)
def test_memory_that_runs_out_is_a_bound(rows: tuple[int, ...], few: int, many: int, tmp_path: Path) -> None:
    mp.spawn(_measure_with_little_memory, (str(tmp_path / "cost"), rows, 2048, 750))
    cost = msgspec.msgpack.decode((tmp_path / "cost").read_bytes(), type=Measured).cost(max(rows))
    assert few <= cost.most_rows <= many
    assert cost.forward_us.at(4) > 0
    assert cost.activation_bytes.at(4) > 4 * 16 * 2**20


@pytest.mark.long
def test_memory_that_is_too_little_for_one_row_is_an_error(tmp_path: Path) -> None:
    mp.spawn(_measure_with_little_memory, (str(tmp_path / "cost"), (2, 8), 4096, 40))
    told = (tmp_path / "cost").read_bytes().decode()
    assert "cannot be measured with 1 rows on cpu" in told
    assert "needs more memory than the device has" in told


def test_integer_inputs_are_those_of_the_user() -> None:
    _, graph, sample = small_graph(rows=3)
    ids, scale = graph.traced.placeholders[:2]
    given, _ = sample.arguments[ids]
    assert torch.equal(sample.value(ids, 5), given[[0, 1, 2, 0, 1]])
    made = sample.value(scale, 5)
    assert made.shape == (5,)
    assert made.is_floating_point()
    assert not made.requires_grad
    value = next(node for node in graph.placement.placed if node.name.startswith("relu"))
    assert sample.value(value, 6).shape == (6, 16)
    assert sample.value(value, 6).requires_grad


@pytest.mark.parametrize("make", [torch.empty_like, lambda order: order.new_empty(order.shape)])
def test_an_index_that_is_made_of_a_permutation(make: Any) -> None:
    """Of synthetic values the permutation is none, and leaves memory as it was: anything."""

    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            order = self.layer(x).argsort(1)
            inverse = make(order)
            inverse[torch.arange(len(x))[:, None], order] = torch.arange(x.shape[1]).expand_as(order)
            return (x * 2).gather(1, inverse)

    graph, sample = graph_of(Sorted(), torch.rand(4, 64))
    before = {node for name, node in graph.nodes.items() if name.endswith((":linear", ":argsort"))}
    rest = extract(graph.traced, graph.placement, set(graph.placement.placed) - before, "Rest")
    assert before & set(rest.inputs)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert measure_alone(rest, sample, (4,)).points[0].forward_us > 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_part_that_does_not_run_is_named() -> None:
    _, graph, sample = small_graph()
    ids = graph.traced.placeholders[0]
    sample.arguments = {**sample.arguments, ids: (torch.full((4,), 99), True)}
    with pytest.raises(
        ProfileError,
        match="Whole cannot be measured with 4 rows on cpu: aten::embedding in module table, "
        r".*test_measure.py:\d+: IndexError: index out",
    ):
        measure_alone(whole(graph), sample, (4,))


def layers_of(graph: ModelGraph) -> list[list[int]]:
    """Ops by the layer that they are in."""
    found: dict[str, list[int]] = {}
    for number, op in enumerate(graph.task.ops):
        found.setdefault(".".join(op.module.split(".")[:2]), []).append(number)
    return list(found.values())


def test_each_structure_is_measured_by_one_of_the_ranks() -> None:
    _, graph, sample = small_graph()
    hashes = block_hashes(graph.task, layers_of(graph))
    ops = dict(zip(hashes, layers_of(graph), strict=True))
    assert len(layers_of(graph)) == 5  # the model's own op, the table, three equal layers
    assert len(ops) == 3
    made: list[str] = []

    def part_of(key: str) -> tuple[Part, tuple[str, ...]]:
        made.append(key)
        return block_part(graph, ops[key]), ()

    missing = dict.fromkeys(ops, (4,))
    told: list[float] = []
    found = measure_missing(missing, part_of, sample, ALONE, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    plain = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.dtype == torch.uint8]
    held = [each for each in plain if each.numel() in (caches.LEAST, caches.SMALL)]
    assert not held, "what drives out caches is given back"
    assert set(found) == set(made) == set(ops)
    assert len(made) == 3
    assert measure_missing({}, part_of, sample, ALONE) == {}


class Lockstep:
    """Ranks that are threads: what they tell each other, and where they meet."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._told: list[bytes] = [b""] * size
        self.met = [0] * size

    def gather(self, rank: int, data: bytes) -> list[bytes]:
        self._told[rank] = data
        self._barrier.wait()
        found = list(self._told)
        self._barrier.wait()
        return found

    def meet(self, rank: int) -> None:
        self.met[rank] += 1
        self._barrier.wait()


def test_all_ranks_of_a_node_measure_the_same_part_at_the_same_moment() -> None:
    _, graph, sample = small_graph()
    layers = layers_of(graph)
    ops = dict(zip(block_hashes(graph.task, layers), layers, strict=True))
    lockstep = Lockstep(2)
    made: list[list[str]] = [[], []]
    turns: list[list[str]] = [[], []]

    def run(rank: int) -> dict[str, Measured]:
        def part_of(key: str) -> tuple[Part, tuple[str, ...]]:
            made[rank].append(key)
            return block_part(graph, ops[key]), ()

        def meet() -> None:
            turns[rank].append(made[rank][-1])
            lockstep.meet(rank)

        ranks = Ranks(rank, 2, gather=functools.partial(lockstep.gather, rank), meet=meet)
        return measure_missing(dict.fromkeys(ops, (2, 4)), part_of, sample, ranks)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    assert set(first) == set(ops)
    keys = list(ops)
    assert made == [[keys[0], keys[2], keys[1]], [keys[1], keys[0], keys[2]]], "compiled code is made once"
    assert lockstep.met[0] == lockstep.met[1] > len(ops) * 2 * FEWEST_TURNS


def test_nodes_share_the_parts() -> None:
    _, graph, sample = small_graph()
    layers = layers_of(graph)
    ops = dict(zip(block_hashes(graph.task, layers), layers, strict=True))
    lockstep = Lockstep(2)
    made: list[list[str]] = [[], []]

    def run(node: int) -> dict[str, Measured]:
        def part_of(key: str) -> tuple[Part, tuple[str, ...]]:
            made[node].append(key)
            return block_part(graph, ops[key]), ()

        ranks = Ranks(node=node, nodes=2, gather=functools.partial(lockstep.gather, node))
        return measure_missing(dict.fromkeys(ops, (4,)), part_of, sample, ranks)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    keys = list(ops)
    assert made == [[keys[0], keys[2]], [keys[1]]]


def test_ranks_meet_also_where_memory_runs_out_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, sample = graph_of(nn.Linear(8, 8), torch.randn(4, 8))
    part = ProfiledPart(whole(graph), sample)
    assert [point.rows for point in part.first((2, 4)).points] == [2, 4]
    met: list[int] = []
    part.turn({2: 3, 4: 2}, lambda: met.append(1))
    usual = len(met)
    assert usual == 3 + 2 + 2 + 1 + 1, "each run, those of first halves, and the accumulation"
    run = ProfileInputs.run

    def short(self: ProfileInputs, part: Part, rows: int, arguments: Any) -> Any:
        if rows == 4:
            raise torch.OutOfMemoryError("none left")
        return run(self, part, rows, arguments)

    monkeypatch.setattr(ProfileInputs, "run", short)
    met.clear()
    turn = part.turn({2: 3, 4: 2}, lambda: met.append(1))
    assert len(met) == usual
    assert set(turn.rows) == {2}


def test_caches_keep_what_a_small_step_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    _, graph, plain = small_graph()
    evicted: set[bool] = set()
    monkeypatch.setattr(caches, "evict", lambda device, *, small: evicted.add(small))
    for touched, rows, small in ((None, 4, False), (Size(0.0, 1 << 20), 4, True), (Size(0.0, 1 << 20), 64, False)):
        evicted.clear()
        sample = ProfileInputs(plain.arguments, plain.gradients, plain.state, CPU, touched=touched)
        measure_alone(whole(graph), sample, (rows,))
        assert evicted == {small}


def test_synthetic_values_are_not_all_equal_and_can_be_written() -> None:
    _, graph, sample = small_graph()
    (node,) = block_part(graph, layers_of(graph)[-1]).inputs
    sample.gradients = frozenset()
    with torch.no_grad():
        value = sample.value(node, measuring.NUMBERS)
    assert value.shape[0] == measuring.NUMBERS
    assert len(value[:64].unique()) > 64
    assert 0.01 <= float(value.min()) < float(value.max()) <= 0.05
    value[:1] = torch.ones(value.shape[1:], requires_grad=True)  # as a model writes a buffer
    assert value.requires_grad


def test_a_part_that_varies_has_more_turns_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graph, sample = graph_of(nn.Linear(8, 8), torch.randn(4, 8))
    monkeypatch.setattr(block_costs, "EXTRA_S", 1e9)
    count = 0
    real = ProfiledPart.turn

    def noisy(factors: Sequence[float]) -> Callable[..., Turn]:
        def turn(self: ProfiledPart, runs: Mapping[int, int], meet: Callable[[], None]) -> Turn:
            nonlocal count
            factor = factors[min(count, len(factors) - 1)]
            count += 1
            rows = {each: RowSamples((Sample(1000 * factor),) * 3, (Sample(2000 * factor),) * 3) for each in runs}
            return Turn(rows, (), real(self, runs, meet).seconds)

        return turn

    monkeypatch.setattr(ProfiledPart, "turn", noisy([3.0, 1.0, 1.6, 2.0, 1.02]))
    (point,) = measure_alone(whole(graph), sample, (4,)).points
    assert count == 5, "the second and the fifth agree"
    assert (point.forward_us, point.backward_us) == (1010, 2020)
    assert not point.is_noisy
    count = 0
    monkeypatch.setattr(ProfiledPart, "turn", noisy([2.0**number for number in range(20)]))
    with caplog.at_level(log.DETAIL, log.get("GraphProfiler").name):
        (point,) = measure_alone(whole(graph), sample, (4,)).points
    assert count == MOST_TURNS
    assert point.is_noisy
    assert "The times of 1 of 1 parts vary by more than 5 %" in caplog.text


@pytest.mark.parametrize(
    ("factor", "often", "third"),
    [(1.0, 1, False), (1.04, 1, False), (1.04, 100, True)],
    ids=["equal", "a small part", "often"],
)
def test_a_third_turn_where_two_differ_by_what_matters(
    factor: float, often: int, third: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, graph, sample = small_graph()
    layers = layers_of(graph)
    ops = dict(zip(block_hashes(graph.task, layers), layers, strict=True))
    small, *_ = ops
    names = {key: f"part{number}" for number, key in enumerate(ops)}
    counts: Counter[str] = Counter()

    class Timed(ProfiledPart):
        def __init__(self, part: Part, *given: Any) -> None:
            super().__init__(part, *given)
            self.name = type(part.module).__name__

        def turn(self, runs: Mapping[int, int], meet: Callable[[], None]) -> Turn:
            us = 100.0 * factor ** counts[self.name] if self.name == names[small] else 10_000.0
            counts[self.name] += 1
            return Turn({rows: RowSamples((Sample(us),) * 3, (Sample(us),) * 3) for rows in runs}, (), 0.01)

    monkeypatch.setattr(block_costs, "ProfiledPart", Timed)
    parts = {key: block_part(graph, each, names[key]) for key, each in ops.items()}
    measure_missing(dict.fromkeys(ops, (4,)), lambda key: (parts[key], ()), sample, ALONE, often={small: often})
    assert counts == {name: 3 if third and key == small else 2 for key, name in names.items()}
