"""The comparison sees what it has to see, and only that."""

from __future__ import annotations

import copy

import msgspec
import numpy as np
import pytest
from parity.case import Case
from parity.compare import differences, plan_differences
from parity.emulator import emulate
from parity.record import Record, load, save

CASE = Case("unused", ranks=2, stages=2, micro=2, optimizer="adamw", rows=(3, 4))


@pytest.fixture(scope="module")
def truth() -> list[Record]:
    return emulate(CASE)


@pytest.fixture
def got(truth: list[Record]) -> list[Record]:
    return [copy.deepcopy(record) for record in truth]  # one by one: the emulated ranks share arrays


def test_equal_records_agree(truth: list[Record], got: list[Record]) -> None:
    assert differences(truth, got) == []


@pytest.mark.parametrize(
    "name",
    [
        "0/0/loss",
        "4/0/loss",
        "1/0/out/",
        "2/0/out/",
        "2/0/input/.0.0",
        "3/grad/layers.2.weight",
        "end/param/layers.5.bias",
        "end/state/never",
    ],
)
def test_a_deviation_in_any_tensor_of_any_rank_is_named(truth: list[Record], got: list[Record], name: str) -> None:
    value = got[1][name]
    if value.dtype == np.uint8:
        got[1][name] = np.frombuffer(b"tuple(*)", dtype=np.uint8)
    else:
        value.reshape(-1)[-1] += 3e-9 * np.abs(value).max()
    (message,) = differences(truth, got)
    assert message.startswith(f"rank 1: {name}: ")


def test_rounding_is_allowed(truth: list[Record], got: list[Record]) -> None:
    for name, value in got[0].items():
        if value.dtype == np.float64:
            got[0][name] = value * (1 + 2e-10)
    assert differences(truth, got) == []


def test_zero_instead_of_none_and_none_instead_of_zero(truth: list[Record], got: list[Record]) -> None:
    del got[0]["0/nograd/never"]
    got[0]["0/grad/never"] = np.zeros(3)
    assert differences(truth, got) == ["rank 0: 0/grad/never: unexpected"]
    assert "rank 0: 0/nograd/never: unexpected" in differences(got, truth)


def test_an_exact_zero_may_be_noise_but_no_value() -> None:
    want: list[Record] = [{"0/grad/a": np.array([3.0]), "0/grad/b": np.zeros(2)}]
    noise: list[Record] = [{"0/grad/a": np.array([3.0]), "0/grad/b": np.array([0.0, 2e-15])}]
    value: list[Record] = [{"0/grad/a": np.array([3.0]), "0/grad/b": np.array([0.0, 1e-12])}]
    assert differences(want, noise) == []
    assert len(differences(want, value)) == 1


def test_nan_wrong_dtype_and_wrong_shape(truth: list[Record], got: list[Record]) -> None:
    got[0]["0/0/loss"] = np.array(np.nan)
    got[0]["1/0/loss"] = got[0]["1/0/loss"].astype(np.float32)
    got[0]["2/0/loss"] = got[0]["2/0/loss"].reshape(1)
    messages = differences(truth, got)
    assert [message.split(": ")[1] for message in messages] == ["0/0/loss", "1/0/loss", "2/0/loss"]


def test_parameters_may_live_on_one_rank_but_on_none_is_an_error(truth: list[Record], got: list[Record]) -> None:
    def drop(record: Record, layer: str) -> None:
        for name in [name for name in record if name.endswith(f"{layer}.bias") and "state" not in name]:
            del record[name]

    drop(got[0], "layers.0")
    drop(got[1], "layers.5")
    assert differences(truth, got) == []
    drop(got[1], "layers.0")
    assert differences(truth, got)[0] == "no rank has 0/grad/layers.0.bias"


def test_state_is_complete_on_rank_0_and_all_or_nothing_elsewhere(truth: list[Record], got: list[Record]) -> None:
    for name in [name for name in got[1] if name.startswith("end/state/")]:
        del got[1][name]
    assert differences(truth, got) == []
    del got[0]["end/state/never"]
    assert differences(truth, got) == ["rank 0: end/state/never: missing"]


def test_the_first_difference_in_time_comes_first(truth: list[Record], got: list[Record]) -> None:
    for name in ("4/0/loss", "end/param/layers.0.bias", "1/grad/layers.0.bias", "1/0/loss"):
        got[0][name] = got[0][name] + 1.0
    order = [message.split(": ")[1] for message in differences(truth, got)]
    assert order == ["1/0/loss", "1/grad/layers.0.bias", "4/0/loss", "end/param/layers.0.bias"]


def _plan(
    replicas: list[int], micro: int, offload: tuple[bool, ...] = (False, False, False), recompute: str = "none"
) -> Record:
    settings = {"none": (True, False), "some": (True, True), "all": (False, True)}
    return {
        "plan/recompute": np.array([settings[recompute]] * len(replicas)),
        "plan/replicas": np.array(replicas),
        "plan/micro": np.array(micro),
        "plan/offload": np.array(offload),
    }


@pytest.mark.parametrize(
    ("replicas", "micro", "words"),
    [
        ([2], 2, "1 stages ran instead of 2"),
        ([1, 1], 1, "1 microbatches ran instead of 2"),
        ([2, 1], 2, r"\[2, 1\] replicas on 2 ranks"),
    ],
)
def test_a_plan_that_was_not_forced_is_named(replicas: list[int], micro: int, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert plan_differences(CASE, [_plan(replicas, micro)]) == []


def test_what_was_offloaded_without_being_asked_to_is_named() -> None:
    (told,) = plan_differences(CASE, [_plan([1, 1], 2, offload=(True, False, False))])
    assert "Offload(optimizer=True, params=False, activations=False) was elsewhere instead of" in told


@pytest.mark.parametrize("asked", ["some", "all"])
@pytest.mark.parametrize("found", ["none", "some", "all"])
def test_which_blocks_recompute_is_compared(asked: str, found: str) -> None:
    case = msgspec.structs.replace(CASE, recompute=True, every_other=asked == "some")
    wrong = [] if found == asked else [f"rank 0: {found.replace('none', 'no')} blocks recompute"]
    assert plan_differences(case, [_plan([1, 1], 2, recompute=found)]) == wrong


def test_the_forced_plan_agrees() -> None:
    assert plan_differences(CASE, [_plan([1, 1], 2)]) == []


def test_records_survive_storage(truth: list[Record], tmp_path) -> None:  # type: ignore[no-untyped-def]
    save(truth[0], tmp_path / "0.rank0.npz")
    assert differences([truth[0]], [load(tmp_path / "0.rank0.npz")]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["0.rank0.npz"]
