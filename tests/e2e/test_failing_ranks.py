"""A rank that fails, in whatever way: an error on every rank, soon, that says which and where; and nothing lives on.

Bounds are generous, because the machine may be busy; without any of this the ranks would wait for 30 minutes.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from job import FORK, PLANNED, ROOT, Job
from thinned import first

pytestmark = pytest.mark.ranks

PROGRAM = str(ROOT / "tests/e2e/programs/failing.py")
PIECE = r"microbatch \d of rank \d's mini-batch"
SOON = 240.0
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


def _run(job: Job, command: list[str], *, codes: set[int] | None = None, **variables: str) -> str:
    """What a failing job prints; it has to end soon, and to leave no rank behind."""
    started = time.monotonic()
    code, output = job.end(*command, **variables)
    assert time.monotonic() - started < SOON, output
    if codes is not None:
        assert code in codes, f"{code}\n{output}"
    assert _ended(_pids(output)), output
    return output


def _pids(output: str) -> set[int]:
    """Of the ranks, from what they print; lines of ranks under torchrun may run together."""
    pids = {int(pid) for pid in re.findall(r"pid (\d+)", output)}
    assert len(pids) >= 2, output
    return pids


def _ended(pids: set[int]) -> bool:
    """Whether these processes end by themselves: a launcher may return a moment before them."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _job(ranks: int, *script: str) -> list[str]:
    return ["rannc-run", "-np", str(ranks), *script]


def _forks(ranks: int, *script: str) -> list[str]:
    """Where what goes wrong is not that processes end or get signals."""
    return _job(ranks, FORK, *script)


def test_an_error_in_the_model_is_an_error_everywhere_and_stays(job: Job) -> None:
    command = _forks(3, PROGRAM, "model", "1", "catch")
    output = _run(job, command, codes={0}, RANNC_PARTITION_NUM="3")
    caught = {int(rank): text for rank, text in re.findall(r"rank (\d) step 3 caught (.*)", output)}
    assert sorted(caught) == [0, 1, 2], output
    (origin,) = [rank for rank, text in caught.items() if text.startswith("ValueError: the trap is sprung")]
    place = rf"rank {origin}, step 3, stage \d, {PIECE}, action F\d \(forward\)"
    assert re.search(place, caught[origin])
    for rank in {0, 1, 2} - {origin}:
        place = rf"rank {origin} \(.*, pid \d+\) failed in step 3, stage \d, {PIECE}, action F\d \(forward\)"
        assert re.match(rf"RankFailedError: {place}: ValueError: the trap is sprung", caught[rank])
        assert f"this is rank {rank}, in step 3" in caught[rank]
    for rank in range(3):
        assert f"rank {rank} step 3 finally" in output
        assert re.search(rf"rank {rank} step 4 caught RankFailedError: rank {origin} .*restart the job", output)


@pytest.mark.parametrize("stages", first(1, ["2", "1"]))
@pytest.mark.parametrize(
    ("what", "error", "place"),
    [
        (
            "backward",
            "ArithmeticError: the trap is sprung in backward",
            rf"stage \d, {PIECE}, action B\d \(backward\)",
        ),
        ("hook", "LookupError: the hook is wrong", r"step 3, stage \d.*\(backward\)"),
        ("script", "KeyError: 'the script is wrong'", "the script, after step 2"),
    ],
)
def test_other_places(job: Job, what: str, error: str, place: str, stages: str) -> None:
    output = _run(job, _forks(2, PROGRAM, what, "1"), codes={1}, RANNC_PARTITION_NUM=stages)
    found = re.search(rf"\[error\] rank (\d) \(.*\) failed in .*{place}", output)
    assert found, output
    origin = found[1]
    assert re.search(rf"\[error\] rank {origin} .*{re.escape(error)}", output)
    # The rank that failed shows its own traceback, with the place below it, and is the one that is reported.
    assert re.search(rf"^\S+:{origin}\] .*{re.escape(error)}$", output, re.MULTILINE), output
    assert re.search(rf"this was rank {origin}, .*{place}", output), output
    last = [line for line in output.splitlines() if re.match(r"rannc-run:   \S+  +\d  ", line)][-1]
    assert last.split()[2] == origin, output
    assert re.search(rf"{re.escape(error)} \(failing\.py:\d+\)$", last), output


@pytest.mark.parametrize(("which", "start"), first(1, [("0", _job), ("1", _forks)]), ids=["0", "1"])
def test_a_rank_that_is_killed(job: Job, which: str, start: Callable[..., list[str]]) -> None:
    output = _run(job, start(2, PROGRAM, "kill", which), codes={137}, RANNC_PARTITION_NUM="2")
    assert re.search(
        rf"\[error\] rank {which} \(.*\), which runs stage \d, has ended without an error message", output
    ), output


@pytest.mark.long
def test_a_rank_that_leaves_early(job: Job) -> None:
    output = _run(job, _forks(2, PROGRAM, "leave", "1"), codes={1})
    assert re.search(
        r"StepError: a connection to another rank broke in step 3.*: rank 1 has ended its script; every rank", output
    ), output


@pytest.mark.long
@pytest.mark.parametrize("how", [(), pytest.param(("join",), marks=pytest.mark.full)])
def test_torchrun_and_a_group_of_the_script(job: Job, how: tuple[str, ...]) -> None:
    command = [*TORCHRUN, FORK, PROGRAM, "model", "1", *how]
    output = _run(job, command, codes={1}, RANNC_PARTITION_NUM="2")
    found = re.search(rf"\[error\] rank (\d) .*failed in step 3, stage \d, {PIECE}, action F\d", output)
    assert found, output
    assert "ValueError: the trap is sprung" in output
    assert output.count("step 3 finally") == 2
    output = _run(job, [*TORCHRUN, PROGRAM, "kill", "0", *how], codes={1}, RANNC_PARTITION_NUM="2")
    assert re.search(r"rank 0 .*has ended without an error message", output), output


@pytest.mark.long
def test_plain_mpirun(job: Job) -> None:
    command = ["mpirun", "-np", "2", "--oversubscribe", sys.executable, PROGRAM, "model", "0"]
    output = _run(job, command, RANNC_PARTITION_NUM="2")
    assert re.search(rf"\[error\] rank \d .*failed in step 3, stage \d, {PIECE}, action F\d", output), output
    assert output.count("step 3 finally") == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("signum", "command"),
    [
        pytest.param(signal.SIGINT, _job(2), id="SIGINT to rannc-run"),
        pytest.param(signal.SIGTERM, _job(2), id="SIGTERM to rannc-run", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, [*TORCHRUN], id="SIGTERM to torchrun"),
        pytest.param(signal.SIGINT, [*TORCHRUN], id="SIGINT to torchrun", marks=pytest.mark.full),
    ],
)
def test_signals_while_a_rank_waits_for_another(job: Job, command: list[str], signum: signal.Signals) -> None:
    code, output = job.interrupted(*command, PROGRAM, "interrupt", "0", ready="training", signum=signum, seconds=SOON)
    assert code != 0, output
    assert _ended(_pids(output)), output


@pytest.mark.long
def test_the_watchdog_shows_the_stacks_of_all_ranks(job: Job) -> None:
    watch = {"RANNC_RUN_WATCHDOG": "true", "RANNC_WATCHDOG_TIMEOUT_S": "5", "RANNC_PARTITION_NUM": "2"}
    output = _run(job, _forks(2, PROGRAM, "sleep", "1"), codes={1}, **watch)
    assert "--- rank 0 waits for others in step 3" in output, output
    assert re.search(
        r"--- rank 1 is in the script, after step 2, at go_wrong \(failing.py:\d+: time.sleep\(10_000\)", output
    )
    assert re.search(r"thread MainThread:(.|\n)*in go_wrong", output)
    assert re.search(r"RankFailedError: the job hangs: no progress for \d+ s .*rank 1 is in the script", output)


@pytest.mark.full
def test_the_watchdog_and_ranks_that_do_not_answer(job: Job) -> None:
    watch = {"RANNC_RUN_WATCHDOG": "true", "RANNC_WATCHDOG_TIMEOUT_S": "5"}
    for which in ("1", "0"):  # rank 0 is the one that collects
        output = _run(job, _job(2, PROGRAM, "stop", which), codes={1}, **watch)
        assert re.search(rf"RankFailedError: the job hangs: .*rank {which} does not answer", output), output


def test_out_of_memory_names_the_promise_and_changes_the_next_plan(job: Job) -> None:
    job.run("rannc-cache", "clear")
    limits = {"RANNC_PARTITION_NUM": "2"}
    output = _run(job, _forks(2, PROGRAM, "memory", "1"), codes={1}, **limits)
    found = re.search(
        rf"\[error\] rank \d .*ran out of memory in step 3, stage (\d), {PIECE}, action F\d",
        output,
    )
    assert found, output
    told = next(
        line for line in output.splitlines() if "out of memory on cpu; requested: 281474976710656 bytes" in line
    )
    assert "the plan estimated" in told
    assert f"for stage {found[1]} (MERGE_" in told
    assert "pipeline_num=2" in told
    assert "checkpointing=true" in told
    assert "mem_limit_gb" in told
    assert re.search(r"Discarded the cached deployment [0-9a-f]+ .*the next run plans for at most", output)
    output = job.train(2, PROGRAM, "nothing", "0", **limits)
    assert "An earlier run of this job ran out of memory: planning for" in output
    assert PLANNED in output


@pytest.mark.long
def test_a_plan_is_made_again_where_memory_is_not_free(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "little.py"
    script.write_text(
        "import resource, psutil, torch, pyrannc\n"
        "torch.manual_seed(0)\n"
        "layers = [torch.nn.Linear(1024, 1024) for _ in range(8)]\n"  # 4 MiB each
        "net = torch.nn.Sequential(*layers)\n"
        "optimizer = torch.optim.Adam(net.parameters())\n"
        "model = pyrannc.RaNNCModule(net, optimizer)\n"
        "used = psutil.Process().memory_info().vms\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + LITTLE * 2**20, resource.RLIM_INFINITY))\n"
        "for _ in range(2):\n"
        "    model(torch.randn(256, 1024)).sum().backward()\n"
        "    optimizer.step()\n"
        "print('stages', len(model.deployment.stages), flush=True)\n"
    )
    command = ["rannc-run", "--no-tune", "-np", "2", str(script)]  # tuned malloc takes memory in large steps
    # ZeRO would fit too, but what its threads' heaps reserve counts against this limit, though it is no memory in use.
    settings = {"RANNC_MAX_PIPELINE": "1", "RANNC_ZERO_STAGE": "0"}
    text = script.read_text()
    script.write_text(text.replace("LITTLE", "100000"))
    for _ in range(4):  # the plan depends on measured times, which other work on the machine disturbs
        output = job.run(*command, **settings)
        if "stages 1" in output:
            break
        job.run("rannc-cache", "clear")
    assert output.count("stages 1") == 2, output
    script.write_text(text.replace("LITTLE", "290"))
    output = job.run(*command, **settings)
    assert re.search(r"Planning again for .* of each device: rank \d's stage needs", output), output
    assert output.count("stages 2") == 2, output


NAN = """
import sys, torch, pyrannc
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)
    def forward(self, x, y):
        hidden = torch.sqrt(self.first(x) ** 2 + y[:, None])
        return torch.nn.functional.mse_loss(self.last(hidden)[:, 0], y)
net = Net()
model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 0.01))
for step in range(4):
    y = torch.ones(4)
    if step == 2 and pyrannc.get_rank() == 1:
        y[3] = -1e6 if sys.argv[1] == "sqrt" else float("nan")
    loss = model(torch.randn(4, 8), y)
    loss.backward()
print("trained", flush=True)
"""


@pytest.mark.long
def test_a_loss_that_is_nan(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "nan.py"
    script.write_text(NAN)
    for stages in ("1", "2"):
        output = job.train(2, str(script), "sqrt", code=1, RANNC_PARTITION_NUM=stages)
        found = rf"rank (\d) .*failed in step 2, stage \d, {PIECE}, action F\d .*NotANumberError: the operator sqrt"
        assert re.search(rf"\[error\] {found} .*of float32\(\d, 8\) from -1e\+06 to", output), output
        assert re.search(rf"RankFailedError: {found}", output), output
        assert re.search(r"NotANumberError: the operator sqrt", output), output
    output = job.train(2, str(script), "input", code=1)
    assert re.search(r"loss .* is NaN, because input argument 1 of this rank contains NaN", output), output
    output = job.train(2, str(script), "sqrt", RANNC_CHECK_NAN="off")
    assert output.count("trained") == 2


DIFFERENT = """
import torch, pyrannc
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x, mask=None, scale=1.0):
        y = self.layer(x) * scale
        return y if mask is None else y * mask
model = pyrannc.RaNNCModule(Net())
one, x, mask = pyrannc.get_rank() == 1, torch.randn(4, 8), torch.ones(4, 8)
calls = {
    "key": lambda: model(x, mask=mask) if one else model(x),
    "dtype": lambda: model(x, mask=mask.to(torch.int64 if one else torch.float32)),
    "position": lambda: model(x, mask) if one else model(x, mask=mask),
    "value": lambda: model(x, scale=2.0 if one else 3.0),
    "mode": lambda: model.train(one)(x),
}
def attempt(name):
    try:
        calls[name]()
    except pyrannc.StepError as exc:
        print(f"{name}: {exc}", flush=True)
for name in calls:
    attempt(name)
model.train()
for scale in (2.0, 3.0):
    model(x, scale=scale)
attempt("value")  # a number is an input now, which may differ as tensors may
print("trained", tuple(model(x).shape), flush=True)
"""


def test_ranks_that_call_in_different_ways_are_told_in_what_and_may_go_on(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "different.py"
    script.write_text(
        DIFFERENT.replace("pyrannc.StepError", "StepError").replace(
            "import torch, pyrannc", "import torch, pyrannc\nfrom rannd.errors import StepError"
        )
    )
    output = job.train(2, str(script))
    for text in (
        "key: .*rank 1 passes mask (a tensor of float32 with 2 dimensions), rank 0 does not",
        "dtype: .*rank 1 passes a tensor of int64 with 2 dimensions as mask, rank 0 a tensor of float32",
        "position: .*rank 1 passes argument 1 (a tensor of float32 with 2 dimensions), rank 0 does not",
        "value: .*rank 1 passes float 2.0 as scale, rank 0 float 3.0",
        "mode: .*rank 1 calls the model in training, rank 0 in evaluation",
    ):
        pattern = text.replace("(", r"\(").replace(")", r"\)")
        assert len(re.findall(pattern, output)) == 2, output
    assert output.count("trained (4, 8)") == 2


APART = """
import os, torch, pyrannc
from rannd.errors import StepError
print(f"pid {os.getpid()}", flush=True)
net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 1e-3))
x = torch.randn(4, 4)
model(x).sum().backward()
rank = pyrannc.get_rank()
call = lambda: model(x)
pairs = {
    "barrier": (call, pyrannc.barrier),
    "other parameters": (lambda: model.get_param("0.bias"), lambda: model.get_param("1.bias")),
    "other gradients": (lambda: model.get_param_grad("0.bias"), lambda: model.get_param_grad("1.bias")),
    "all parameters": (lambda: list(model.named_parameters(from_global=True)), call),
    "undeploy": (call, model.undeploy),
    "wrap": (lambda: pyrannc.RaNNCModule(torch.nn.Linear(4, 4)), call),
    "reduce": (model.allreduce_grads, pyrannc.barrier),
    "distribute": (lambda: pyrannc.DistributeModelParams().__enter__(), pyrannc.barrier),
    "state": (model.state_dict, model.undeploy),
}
if len(model.deployment.stages) == 1:  # each rank has all parameters, and tells them alone
    for name in ("other parameters", "other gradients", "all parameters"):
        del pairs[name]
for name, pair in pairs.items():
    try:
        pair[rank]()
    except StepError as exc:
        print(f"{name}: {exc}", flush=True)
model(x).sum().backward()
print("trained", flush=True)
if rank == 1:
    try:
        raise KeyError("the script is wrong")
    finally:
        pyrannc.barrier()
model(x)
"""


def test_ranks_that_do_different_things_together_are_told(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "apart.py"
    script.write_text(APART)
    for stages in ("1", "2"):
        output = _run(job, _forks(2, str(script)), codes={1}, RANNC_PARTITION_NUM=stages)
        divided = (
            "other parameters: in get_param, .* rank 0 asks for '0.bias', rank 1 for '1.bias': every rank",
            "other gradients: in get_param_grad rank 0 asks for '0.bias', rank 1 for '1.bias'",
            "all parameters: rank 0 is in get_param, or another function that gathers parameters, rank 1 in",
        )
        for text in (
            *(divided if stages == "2" else ()),
            "barrier: rank 0 is in the forward of call 1, rank 1 in barrier: every rank has to .* call it on all",
            "undeploy: rank 0 is in the forward of call 1, rank 1 in undeploy",
            "wrap: rank 0 is in profile or the constructor of RaNNCModule, rank 1 in the forward of call 1",
            "reduce: rank 0 is in allreduce_grads, rank 1 in barrier",
            "distribute: rank 0 is in DistributeModelParams, rank 1 in barrier",
            "state: rank 0 is in state_dict, rank 1 in undeploy: .* and save what it returns on rank 0 alone",
        ):
            assert len(re.findall(rf"{text}", output)) >= 2, (text, output)
        assert output.count("trained") == 2
        assert "KeyError: 'the script is wrong'" in output


WORKERS = """
import os, sys, torch, pyrannc
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if sys.argv[1] == "worker" and index == 20 and pyrannc.get_rank() == 1:
            raise ValueError("a bad sample")
        return torch.full((8,), float(index))
loader = torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="fork")
print(f"pid {os.getpid()}", flush=True)
net = torch.nn.Linear(8, 8)
model = pyrannc.RaNNCModule(net, torch.optim.SGD(net.parameters(), 1e-6))
for epoch in range(2):  # the second one forks beside the connections
    for x in loader:
        model(x).sum().backward()
        if sys.argv[1] == "rank" and epoch == 1 and pyrannc.get_rank() == 1:
            os._exit(3)
print("trained", flush=True)
"""


@pytest.mark.full
def test_forked_workers_neither_speak_for_a_rank_nor_keep_it_alive(job: Job, tmp_path: Path) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    output = _run(job, _job(2, str(script), "nothing"), codes={0})
    assert output.count("trained") == 2
    assert "[error]" not in output
    output = _run(job, _job(2, str(script), "worker"), codes={1})
    assert re.search(
        r"\[error\] rank 1 .*failed in the script, after step \d: ValueError: Caught ValueError in", output
    ), output
    output = _run(job, [*TORCHRUN, str(script), "rank"], codes={1})
    assert re.search(r"rank 1 .*has ended without an error message", output), output


@pytest.mark.long
def test_workers_that_run_the_script_again_are_told_what_to_write(job: Job) -> None:
    output = job.run(*_job(2, str(ROOT / "tests/e2e/programs/spawning_workers.py")), code=1)
    assert re.search(r"UsageError: a process that rank [01] has started with multiprocessing.*__main__", output), output
