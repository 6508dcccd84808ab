"""Models on the meta device in a world of one rank: where values come from, what is refused, what optimizers keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import pyrannc
from rannd.errors import CheckpointError, RanndError, UsageError

META = torch.device("meta")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.middle(self.first(x))))


class Holder:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Own(Net):
    """What no class's initialisation knows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 2.0))
        self.register_buffer("table", torch.arange(6.0))
        self.mask = torch.eye(6)
        self.pairs = [(torch.ones(6), "name")]
        self.holder = Holder(torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale @ self.mask + self.table * self.pairs[0][0] + self.holder.value


def bare(kind: Callable[[], nn.Module] = Net) -> nn.Module:
    with META:
        return kind()


def recorded(kind: Callable[[], nn.Module] = Own) -> nn.Module:
    with pyrannc.DistributeModelParams():
        return kind()


def trained(model: nn.Module, **more: Any) -> Any:
    """Wrapped, after one call."""
    found = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)
    found(torch.randn(4, 6, dtype=next(model.parameters()).dtype))
    return found


def test_objects_ties_flags_attributes_and_hooks_stay() -> None:
    model = bare()
    model.first.bias.requires_grad_(False)
    model.middle[0].weight.no_decay = True
    seen: list[torch.Tensor] = []
    model.middle[0].weight.register_hook(seen.append)
    objects = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    wrapped = trained(model)
    assert {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()} == objects
    assert model.last.weight is model.first.weight
    assert not model.first.bias.requires_grad
    assert model.middle[0].weight.no_decay
    wrapped(torch.randn(4, 6)).sum().backward()
    assert len(seen) == 1
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_each_value_is_as_its_module_initialises_it() -> None:
    state = trained(bare()).state_dict()
    bound = 6**-0.5
    assert 0.3 * bound < float(state["first.weight"].abs().mean()) < 0.7 * bound
    assert float(state["first.weight"].abs().max()) <= bound
    assert torch.equal(state["middle.1.weight"], torch.ones(6))
    assert state["middle.1.num_batches_tracked"] == 1


def test_the_seed_is_the_scripts_and_each_model_takes_another() -> None:
    def weights() -> torch.Tensor:
        return trained(bare()).state_dict()["middle.0.weight"]

    torch.manual_seed(3)
    one, two = weights(), weights()
    torch.manual_seed(3)
    again = weights()
    assert torch.equal(one, again)
    assert not torch.equal(one, two)
    model = Net()
    torch.manual_seed(3)
    pyrannc.RaNNCModule(model)  # with values: nothing is drawn
    assert torch.equal(torch.randn(2), torch.randn(2, generator=torch.Generator().manual_seed(3)))


def test_a_constructor_is_recorded_whole() -> None:
    model = recorded()
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    wrapped = trained(model)
    state = wrapped.state_dict()
    assert torch.equal(state["scale"], torch.full((6,), 2.0))
    assert torch.equal(state["table"], torch.arange(6.0))
    assert torch.equal(model.mask, torch.eye(6))
    assert torch.equal(model.pairs[0][0], torch.ones(6))
    assert torch.equal(model.holder.value, torch.full((6,), 0.5))
    x = torch.randn(4, 6)
    plain = Own()
    plain.load_state_dict(state)
    wrapped.eval()
    plain.eval()
    torch.testing.assert_close(wrapped(x), plain(x))


@pytest.mark.parametrize("convert", [nn.Module.double, nn.Module.bfloat16])
def test_conversions_after_the_block_hold(convert: Callable[[nn.Module], nn.Module]) -> None:
    class Converted(Own):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Net.forward(self, x) * self.scale + self.table

    model = convert(recorded(Converted))
    state = trained(model).state_dict()
    dtype = convert(nn.Linear(1, 1)).weight.dtype
    assert {value.dtype for value in state.values()} == {dtype, torch.int64}
    assert torch.equal(state["table"], torch.arange(6.0, dtype=dtype))


def test_blocks_can_be_nested_and_may_fail() -> None:
    with pyrannc.DistributeModelParams():
        first = nn.Linear(6, 6)
        with pyrannc.DistributeModelParams():
            second = nn.Linear(6, 6)
        assert torch.zeros(1).device.type == "cpu"
    trained(nn.Sequential(first, second))
    with pytest.raises(ZeroDivisionError), pyrannc.DistributeModelParams():
        1 / 0  # noqa: B018
    assert not torch.zeros(1).is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_what_ranks_do_together_is_refused_in_the_block() -> None:
    wrapped = pyrannc.RaNNCModule(Net())
    wrapped(torch.randn(4, 6))
    for name, do in (
        ("the constructor of RaNNCModule", lambda: pyrannc.RaNNCModule(Net())),
        ("profile or", lambda: pyrannc.profile(Net(), torch.randn(4, 6))),
        ("the forward of call 1", lambda: wrapped(torch.ones(4, 6))),
        ("get_param", lambda: wrapped.get_param("first.weight")),
    ):
        message = rf"{name}.* inside a block of DistributeModelParams"
        with pytest.raises(UsageError, match=message), pyrannc.DistributeModelParams():
            do()
    with pyrannc.DistributeModelParams():
        pyrannc.barrier()
        model = Net()
    trained(model)
    wrapped(torch.randn(4, 6))


def test_what_is_written_after_the_block_is_refused() -> None:
    model = recorded(Net)
    model.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    with pytest.raises(UsageError, match=r"first.weight was written after the block of DistributeModelParams"):
        trained(model)


def test_memory_that_the_constructor_leaves_open_is_zero() -> None:
    class Empty(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.scale

    assert not trained(recorded(Empty)).state_dict()["scale"].any()


class Nobodys(Net):
    """A parameter that no class initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.middle.scale = nn.Parameter(torch.ones(6))


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def reset_parameters(self) -> None:
        self.scale.data[:2] = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class Fails(Half):
    def reset_parameters(self) -> None:
        raise RuntimeError("no way.")


class Wrong(Half):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.zero_().index_copy_(0, torch.tensor([9]), torch.ones(1))


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.mask


class Buffered(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.table


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Nobodys, r"parameter middle.scale is on the meta device, and has no source of initial values \(Sequential "
                  r"middle\); give RaNNCModule\(checkpoint=...\).*DistributeModelParams"),
        (Half, r"scale is on the meta device, and the initialisation of its module \(Half\) leaves 4 of its 6 values"),
        (Fails, r"Fails.reset_parameters of module the model failed .*: RuntimeError: no way; give RaNNCModule"),
        (Wrong, r"the recorded operators of scale fail with actual values: IndexError: index_copy_.*; the model"),
        (Masked, r"\[mask\]: tensors of the model on the meta device that are neither parameters nor buffers"),
        (Buffered, r"buffer table is on the meta device, and has no source of initial values \(Buffered\)"),
        (lambda: nn.Sequential(nn.LazyLinear(6)), r"parameter 0.weight .* has no shape yet \(a lazy module\)"),
    ],
    ids=["own parameter", "half", "fails", "wrong index", "attribute", "buffer", "lazy"],
)  # fmt: skip
def test_values_that_nobody_knows_are_named(kind: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trained(bare(kind))


def test_any_model_without_values_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 6)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return super().forward(self.table(index))

    monkeypatch.setenv("RANNC_PARTITIONING_DRY_RUN_NP", "4")
    for device in ("meta", "cpu"):
        model = bare(Wide)
        wrapped = pyrannc.RaNNCModule(model, torch.optim.Adam(model.parameters()))
        with pytest.raises(SystemExit) as ended:
            wrapped(torch.randint(5, (8,), device=device))
        assert not ended.value.code
        assert all(parameter.is_meta for parameter in model.parameters())


def test_code_sees_a_model_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asks(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.middle[0].weight
            more = torch.ones(6, device=weight.device) + torch.arange(6.0)
            return super().forward(x) * more if weight.device.type == "cpu" and weight.is_cpu else x * 0

    monkeypatch.setenv("RANNC_VERIFY_PARTITIONING", "true")  # cannot be done, and says so
    wrapped = trained(bare(Asks))
    assert wrapped.eval()(torch.randn(4, 6)).abs().sum() > 0


def test_a_call_on_the_meta_device_is_refused() -> None:
    model = bare()
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"argument 0 of the model is on the meta device.*can be planned"):
        wrapped(torch.randn(4, 6, device="meta"))


def test_classes_of_other_houses_initialise_themselves() -> None:
    class NanoGpt(Net):
        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 0.25)

    class Titan(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(6), persistent=False)

        def init_weights(self, device: torch.device | None = None) -> None:
            self.table = torch.arange(6.0)
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.table

    assert trained(bare(NanoGpt)).state_dict()["first.weight"].unique().tolist() == [0.25]
    titan = bare(Titan)
    assert trained(titan).state_dict()["first.weight"].unique().tolist() == [0.5]
    assert torch.equal(titan.table, torch.arange(6.0))


def test_hugging_face_models_are_initialised_as_their_constructors_do() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=3, n_head=2, initializer_range=0.5, use_cache=False
    )
    model = bare(lambda: transformers.GPT2LMHeadModel(config))
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.randint(40, (2, 8))
    wrapped(input_ids=ids, labels=ids)
    state = wrapped.state_dict()
    assert 0.4 < float(state["transformer.wte.weight"].std()) < 0.6
    scaled = 0.5 / (2 * 3) ** 0.5
    assert 0.8 * scaled < float(state["transformer.h.1.mlp.c_proj.weight"].std()) < 1.2 * scaled
    assert model.lm_head.weight is model.transformer.wte.weight
    assert wrapped.eval()(input_ids=ids).logits.isfinite().all()


# -- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_all_values_whatever_the_model_has(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Own().double().state_dict().items() if name != "last.weight"}
    save_file(state, tmp_path / "model.safetensors")
    for model in (Own(), recorded()):
        found = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=tmp_path)
        with torch.no_grad():
            found.eval()(torch.randn(4, 6))
        now = found.state_dict()
        assert all(torch.equal(now[name], value.to(now[name].dtype)) for name, value in state.items())
        assert torch.equal(now["last.weight"], now["first.weight"])
        assert now["first.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("first.bias"), r"missing \[first.bias\], unexpected \[\]"),
        (lambda state: state.update(other=torch.ones(1)), r"missing \[\], unexpected \[other\]"),
        (lambda state: state.update({"first.bias": torch.ones(7)}), r"first.bias has shape \(7,\) in .* and \(6,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_at_once(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    state = {name: value.clone() for name, value in Net().state_dict().items()}
    change(state)
    save_file(state, tmp_path / "it.safetensors")
    with pytest.raises(CheckpointError, match=message):
        pyrannc.RaNNCModule(bare(), checkpoint=tmp_path / "it.safetensors")


def test_a_state_is_kept_until_there_is_memory_for_it() -> None:
    state = {name: value * 3 for name, value in Net().state_dict().items()}
    model = bare()
    wrapped = pyrannc.RaNNCModule(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert wrapped.state_dict()["first.weight"].is_meta
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"first.weight"):
        wrapped.load_state_dict({})
    with pytest.raises(RuntimeError, match=r"size mismatch for first.bias"):
        wrapped.load_state_dict({**state, "first.bias": torch.ones(7)})
    assert wrapped.load_state_dict({**state, "more": torch.ones(1)}, strict=False).unexpected_keys == ["more"]
    with torch.no_grad():
        wrapped.eval()(torch.randn(4, 6))
    assert all(torch.equal(value, state[name]) for name, value in wrapped.state_dict().items())


def test_a_file_that_is_damaged_after_it_was_looked_at_is_named(tmp_path: Path) -> None:
    save_file({name: value.clone() for name, value in Net().state_dict().items()}, tmp_path / "it.safetensors")
    model = bare()
    wrapped = pyrannc.RaNNCModule(model, checkpoint=tmp_path / "it.safetensors")
    (tmp_path / "it.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"first.weight cannot be read from .*it.safetensors"):
        wrapped(torch.randn(4, 6))


def test_what_needs_values_before_the_first_call_says_so(tmp_path: Path) -> None:
    wrapped = pyrannc.RaNNCModule(bare())
    with pytest.raises(UsageError, match=r"first.weight is on the meta device and has no values before"):
        wrapped.get_param("first.weight")
    with pytest.raises(UsageError, match=r"has no values before the model's first call"):
        dict(wrapped.named_parameters(from_global=True))
    with pytest.raises(UsageError, match=r"first.weight is on the meta device; .* a RaNNCModule has them once it was"):
        pyrannc.save_checkpoint(tmp_path / "it", wrapped)
    assert not (tmp_path / "it").exists()


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.2),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=["sgd", "adam", "adagrad"])
def test_saving_and_going_on_from_the_meta_device(tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """`load_checkpoint` before the first call, and after it, and `undeploy`: all as one run that never stops."""
    batches = torch.randn(6, 4, 6)

    def wrapped(model: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
        optimizer = make(model.parameters())
        return pyrannc.RaNNCModule(model, optimizer), optimizer

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, torch.Tensor]:
        for step in steps:
            optimizer.zero_grad()
            model(batches[step]).square().mean().backward()
            optimizer.step()
        found: dict[str, torch.Tensor] = model.state_dict()
        return found

    one = wrapped(recorded())
    train(*one, range(2))
    pyrannc.save_checkpoint(tmp_path / "it", *one, step=2)
    one[1].param_groups[0]["lr"] = 0.05
    end = train(*one, range(2, 4))
    pyrannc.clear()

    before = wrapped(recorded())
    assert pyrannc.load_checkpoint(tmp_path / "it", *before).step == 2
    before[1].param_groups[0]["lr"] = 0.05  # as schedulers do
    assert all(torch.equal(value, end[name]) for name, value in train(*before, range(2, 4)).items())

    after = wrapped(bare(Net))
    with pytest.raises(CheckpointError, match="scale is not in the model"):
        pyrannc.load_checkpoint(tmp_path / "it", *after)
    pyrannc.clear()
    after = wrapped(recorded())
    train(*after, range(1))
    pyrannc.load_checkpoint(tmp_path / "it", *after)
    after[1].param_groups[0]["lr"] = 0.05
    train(*after, range(2, 3))
    after[0].undeploy()
    assert not any(parameter.is_meta for parameter in after[0].parameters())
    assert all(torch.equal(value, end[name]) for name, value in train(*after, range(3, 4)).items())


def test_a_state_goes_through_the_models_own_code_and_replaces_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    class Old(Net):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            if "early.weight" in state_dict:
                state_dict["first.weight"] = state_dict.pop("early.weight")
            super()._load_from_state_dict(state_dict, prefix, *args)

    state = {name: value * 3 for name, value in Net().state_dict().items()}
    save_file({name: value.clone() for name, value in state.items()}, tmp_path / "it.safetensors")
    model = bare(Old)
    wrapped = pyrannc.RaNNCModule(model, checkpoint=tmp_path / "it.safetensors")
    keys = wrapped.load_state_dict({"early.weight": torch.ones(6, 6)}, strict=False)
    assert not keys.unexpected_keys
    with torch.no_grad():
        wrapped.eval()(torch.randn(4, 6))
    now = wrapped.state_dict()
    assert torch.equal(now["last.weight"], torch.ones(6, 6))
    assert all(torch.equal(now[name], value) for name, value in state.items() if "weight" not in name)


def test_values_that_the_script_gives_after_wrapping_stay() -> None:
    model = bare()
    wrapped = pyrannc.RaNNCModule(model)
    model.middle[0].weight = nn.Parameter(torch.full((6, 6), 0.5))
    state = {name: value * 3 for name, value in Net().state_dict().items()}
    with torch.no_grad():
        wrapped.eval()(torch.randn(4, 6))
    assert torch.equal(wrapped.state_dict()["middle.0.weight"], torch.full((6, 6), 0.5))
    model = bare()
    wrapped = pyrannc.RaNNCModule(model)
    wrapped.load_state_dict(state, assign=True)
    with torch.no_grad():
        wrapped.eval()(torch.randn(4, 6))
    assert all(torch.equal(value, state[name]) for name, value in wrapped.state_dict().items())


# -- optimizers ---------------------------------------------------------------------------------------------------


def test_constructor_state_is_made_again_with_the_settings_of_its_group() -> None:
    model = bare()
    groups = [{"params": [model.first.weight]}, {"params": list(model.middle.parameters()), "lr": 0.5}]
    optimizer = torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.7)
    optimizer.state[model.first.weight]["step"].fill_(9)
    wrapped = pyrannc.RaNNCModule(model, optimizer)
    wrapped(torch.randn(4, 6))
    assert torch.equal(optimizer.state[model.first.weight]["sum"], torch.full((6, 6), 0.7))
    assert optimizer.state[model.first.weight]["step"] == 9
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    wrapped(torch.randn(4, 6)).sum().backward()
    optimizer.step()


class Momenta(torch.optim.Optimizer):
    """State from the constructor, and a name of its own for a setting."""

    def __init__(self, params: Any, rate: float, start: float = 1.0) -> None:
        super().__init__(params, {"rate": rate, "start": start})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum"] = torch.full_like(parameter, group["start"])

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class Secretive(Momenta):
    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params, 0.1)


def test_any_class_of_optimizer_is_made_again_or_named() -> None:
    model = bare()
    optimizer = Momenta(model.parameters(), 0.1, start=4.0)
    pyrannc.RaNNCModule(model, optimizer)(torch.randn(4, 6))
    assert optimizer.state[model.first.bias]["momentum"].tolist() == [4.0] * 6
    model = bare()
    wrapped = pyrannc.RaNNCModule(model, Secretive(model.parameters(), 5))
    with pytest.raises(UsageError, match=r"state without values \(meta device\), and Secretive cannot be made again"):
        wrapped(torch.randn(4, 6))


def test_state_that_was_lost_on_the_meta_device_is_named() -> None:
    real = Net()
    optimizer = torch.optim.Adam(real.parameters())
    real(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    model = bare()
    other = torch.optim.Adam(model.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    wrapped = pyrannc.RaNNCModule(model, other)
    with pytest.raises(UsageError, match=r"state 'exp_avg' of first.weight has no values.*after the first call"):
        wrapped(torch.randn(4, 6))
    with pyrannc.DistributeModelParams():
        model = Net()
        other = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    wrapped = pyrannc.RaNNCModule(model, other)
    with pytest.raises(RanndError, match="setting 'lr' of the optimizer is a tensor on the meta device"):
        wrapped(torch.randn(4, 6))


@pytest.mark.parametrize("layers", [0, 1])
def test_tensors_in_plain_attributes_keep_their_values(layers: int) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._two = torch.tensor([2])
            self.table = {"steps": [torch.arange(4.0), torch.full((4,), 0.5)]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            steps, half = self.table["steps"]
            return x * self._two * half + steps

    with pyrannc.DistributeModelParams():
        model = nn.Sequential(Scaled(), *(nn.Linear(4, 4) for _ in range(layers)))
    bare = nn.Sequential(Scaled(), *model[1:]) if layers else Scaled()
    x = torch.randn(3, 4)
    torch.testing.assert_close(pyrannc.RaNNCModule(model)(x), bare(x))
    assert model[0]._two.tolist() == [2]
