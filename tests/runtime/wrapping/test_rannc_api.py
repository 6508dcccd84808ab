"""Scripts written for RaNNC: each call that its API has is taken under its names, or refused by a UsageError."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyrannc
from rannd.errors import StepError, UsageError

# Names of RaNNC's arguments, in order; those behind "*" are given by name only.
METHODS = {
    "__init__": "model optimizer gather_inputs load_deployment enable_apex_amp allreduce_amp_master_params enable_zero "
    "check_unused_values offload_params",
    "allreduce_grads": "",
    "allreduce_grads_zero": "",
    "buffers": "* from_global",
    "calc_grad_norm": "",
    "clip_grad_norm": "max_grad_norm",
    "cuda": "",
    "enable_dropout": "enable",
    "eval": "",
    "get_param": "name amp_master_param",
    "get_param_grad": "name amp_master_param",
    "is_checkpointing_enabled": "",
    "load_state_dict": "state_dict strict",
    "named_buffers": "* from_global",
    "named_parameters": "* from_global",
    "parameters": "* from_global",
    "save_deployment": "file",
    "state_dict": "* no_hook amp_master_params rank0_only sync_all_ranks",
    "to": "device",
    "train": "mode",
    "undeploy": "",
    "zero_grad": "",
}
OPTIMIZER = {"state_dict": "from_global to_cpu root", "load_state_dict": "state_dict from_global"}
FUNCTIONS = {
    "_dump_events": "",
    "all_gather": "ten buf",
    "barrier": "",
    "clear": "",
    "delay_grad_allreduce": "delay",
    "get_dist_param_range": "pid",
    "get_rank": "",
    "get_world_size": "",
    "keep_graph": "keep",
    "load_dist_param": "pid",
    "recreate_all_communicators": "",
    "set_dist_param": "pid src",
    "set_dist_param_dtype": "pid dtype",
    "show_deployment": "path batch_size",
    "store_dist_param": "p",
    "sync_params_on_init": "sync",
}
ATTRIBUTES = ["model", "optimizer", "ready", "device", "name_to_param", "gather_inputs", "is_training", "enable_zero"]


def wrapped() -> tuple[Any, torch.optim.Optimizer]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return pyrannc.RaNNCModule(net, optimizer), optimizer


def takes(function: Callable[..., Any], names: str) -> None:
    by_place, _, by_name = names.partition("*")
    signature = inspect.signature(function)
    signature.bind(*by_place.split(), **dict.fromkeys(by_name.split()))
    signature.bind(**dict.fromkeys(by_place.split() + by_name.split()))


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_their_arguments_by_place_and_by_name(name: str) -> None:
    takes(getattr(wrapped()[0], name) if name != "__init__" else pyrannc.RaNNCModule, METHODS[name])


@pytest.mark.parametrize("name", OPTIMIZER)
def test_the_optimizers_methods_take_their_arguments(name: str) -> None:
    takes(getattr(wrapped()[1], name), OPTIMIZER[name])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_take_their_arguments(name: str) -> None:
    takes(getattr(pyrannc, name), FUNCTIONS[name])


def test_a_context_that_is_not_enabled_does_nothing() -> None:
    for enable in (False, True):
        with pyrannc.DistributeModelParams(enable=enable):
            layer = nn.Linear(2, 2)
        assert layer.weight.is_meta is enable


def test_options_without_meaning_are_refused_with_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"RaNNCModule\(\.\., enable_apex_amp=True\): .*autocast"):
        pyrannc.RaNNCModule(nn.Linear(2, 2), enable_apex_amp=True)


def test_offload_params_is_the_item_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for value in ("auto", "false"):
        monkeypatch.setenv("RANNC_OFFLOAD_PARAMS", value)
        inner = nn.Linear(2, 2)
        model = pyrannc.RaNNCModule(inner, torch.optim.SGD(inner.parameters(), lr=0.1), offload_params=True)
        model(torch.ones(3, 2)).sum().backward()
        found.append(model.deployment.offload_params)
    assert found == [True, False]


def test_offload_params_goes_with_enable_zero() -> None:
    inner = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    model = pyrannc.RaNNCModule(inner, optimizer, enable_zero=True, offload_params=True)
    model(torch.ones(3, 2)).sum().backward()
    assert (model.deployment.offload_params, model.deployment.zero) == (True, 3)


def test_options_without_effect_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        pyrannc.RaNNCModule(nn.Linear(2, 2), check_unused_values=False, allreduce_amp_master_params=True)
    told = [each.getMessage() for each in caplog.records if "has no effect" in each.getMessage()]
    assert told == [
        "allreduce_amp_master_params has no effect: gradients are reduced in the type of the parameters, or with "
        "master_weights in float32; reduce_dtype chooses"
    ]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "dist_param" in name])
def test_functions_for_divided_parameters_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"pyrannc\.{name}: parameters are not divided in this way"):
        getattr(pyrannc, name)(*FUNCTIONS[name].split())


def test_a_name_that_nobody_knows_is_still_unknown() -> None:
    assert not hasattr(pyrannc, "get_dist_params")
    assert not hasattr(wrapped()[0], "used_param_id")


@pytest.mark.parametrize("name", ["_dump_events", "recreate_all_communicators"])
def test_functions_without_effect_say_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        getattr(pyrannc, name)()
    assert [f"{name} has no effect" in each.getMessage() for each in caplog.records].count(True) == 1


def test_attributes_of_the_wrapper() -> None:
    model, optimizer = wrapped()
    assert [name for name in ATTRIBUTES if not hasattr(model, name)] == []
    assert (model.model, model.optimizer, model.device) == (model.module, optimizer, torch.device("cpu"))
    assert (model.gather_inputs, model.is_training, model.enable_zero, model.ready) == (True, True, False, False)
    assert list(model.name_to_param) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    model(torch.ones(2, 4)).sum().backward()
    assert model.ready


def test_the_models_own_attributes_come_first() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Linear(2, 2)
            self.device = "tpu"

    net = Outer()
    model: Any = pyrannc.RaNNCModule(net)
    assert model.model is net.model
    assert model.device == "tpu"


def test_norms_and_gradients_of_a_step() -> None:
    model, _ = wrapped()
    model.enable_dropout(enable=False)
    assert not model.is_checkpointing_enabled()
    model(torch.ones(2, 4)).sum().backward()
    norm = model.calc_grad_norm()
    torch.testing.assert_close(model.clip_grad_norm(max_grad_norm=1e9), norm)
    gradients = [model.get_param_grad(name, amp_master_param=True) for name in model.name_to_param]
    torch.testing.assert_close(torch.cat([each.flatten() for each in gradients]).norm(), norm)
    pyrannc.delay_grad_allreduce(True)
    model(torch.ones(2, 4)).sum().backward()
    for read in (
        model.calc_grad_norm,
        lambda: model.get_param_grad("0.weight"),
        lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    ):
        with pytest.raises(StepError, match=r"gradients were not reduced yet .* call model\.allreduce_grads\(\)"):
            read()
    model.allreduce_grads_zero()
    torch.testing.assert_close(model.calc_grad_norm(), norm * 2)


def test_states_of_model_and_optimizer(tmp_path: Path) -> None:
    model, optimizer = wrapped()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert model.state_dict(sync_all_ranks=True).keys() == model.name_to_param.keys()
    state = optimizer.state_dict(from_global=True, to_cpu=True, root=0)  # type: ignore[call-arg]
    assert len(state["state"]) == 4
    optimizer.load_state_dict(state, True)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match=r"root=1\): ranks are 0 to 0"):
        optimizer.state_dict(from_global=True, root=1)  # type: ignore[call-arg]


def test_tensors_of_all_ranks() -> None:
    ten, buf = torch.arange(3.0), torch.empty(1, 3)
    pyrannc.all_gather(ten, buf)
    assert torch.equal(buf, ten.unsqueeze(0))
    with pytest.raises(UsageError, match=r"make it torch\.empty\(1, 3, dtype=torch\.float32\)"):
        pyrannc.all_gather(ten, torch.empty(2))
