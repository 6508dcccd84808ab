"""The configuration: the table, the file, the variables, and what is written about them."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import tomli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rannd.config import ITEMS, Config, config_directory, document, load
from rannd.config.item import item, items_of, toml_text
from rannd.config.tomlfile import TomlFile
from rannd.errors import ConfigError

ROOT = Path(__file__).parent.parent

#: Every item of RaNNC's table, by hand from its sources and documents.
_UPSTREAM = """
decomposer partition_num replica_num pipeline_num min_pipeline max_pipeline min_pipeline_bs min_partition_num
max_partition_num dp_search_all limit_dev_num_pot limit_dev_num_more_than_bs alloc_repl_flat coarsen_by_time
do_coarsening do_uncoarsening profile_by_acc force_dist_matmul checkpointing checkpointing_no_last auto_parallel
disable_balancing max_mp_num mem_limit_gb mem_margin opt_param_factor save_deployment load_deployment deployment_file
save_graph_profile load_graph_profile graph_profile_file save_mlpart_results load_mlpart_results mlpart_results_file
save_alloc_solutions load_alloc_solutions alloc_solutions_file_prefix consolidate_grads sync_allreduce p2p_comm
use_mpi_to_gather_dist_params run_watchdog watchdog_lockfile_dir use_named_tensors profiler_cache_size
partitioning_dry_run_np skip_grad_scaling show_config_items profiling graph_profiling profile_dump_path profiling_iter
dump_graph dump_graph_prefix validate_comm display_comm_value display_act_value trace_events event_trace_file
verify_recomp verify_partitioning dump_dp_node_profiles dump_dp_cache enable_kineto
"""
UPSTREAM = _UPSTREAM.split()
OWN = [
    "device",
    "verify_trace",
    "verify_step",
    "cache",
    "cache_max_gb",
    "daemon_idle_s",
    "daemon_timeout_s",
    "log_level",
]
OWN += [
    "partitioning_dry_run_cluster",
    "schedule",
    "virtual_stages",
    "interleave_loss",
    "watchdog_timeout_s",
    "check_nan",
    "wait_notice_s",
    "transport",
    "compile_stages",
    "zero_stage",
    "reshard_after_forward",
    "master_weights",
    "reduce_dtype",
    "offload_optimizer",
    "offload_params",
    "offload_activations",
    "offload_dir",
    "calibrate_after",
    "replan",
]
OWN += ["nproc", "hosts", "hostfile", "log_dir", "show_ranks", "grace_period", "timeout_start", "tune", "preflight"]
ELASTIC = ["elastic", "min_np", "max_np", "max_restarts", "leave_timeout", "straggler_factor", "drop_stragglers"]
ELASTIC += ["checkpoint_every", "snapshots", "checkpoints_kept"]
OWN += ELASTIC

#: Every item that can change a plan. Whoever adds an item decides here, too, in which of the two sets it is.
PLAN_AFFECTING = {
    "compile_stages",
    "zero_stage",
    "reshard_after_forward",
    "master_weights",
    "reduce_dtype",
    "offload_optimizer",
    "offload_params",
    "offload_activations",
    "interleave_loss",
    "sync_allreduce",
    "decomposer",
    "partition_num",
    "replica_num",
    "pipeline_num",
    "min_pipeline",
    "max_pipeline",
    "min_pipeline_bs",
    "min_partition_num",
    "max_partition_num",
    "limit_dev_num_pot",
    "coarsen_by_time",
    "do_coarsening",
    "do_uncoarsening",
    "profile_by_acc",
    "schedule",
    "virtual_stages",
    "checkpointing",
    "checkpointing_no_last",
    "mem_limit_gb",
    "mem_margin",
    "opt_param_factor",
    "load_deployment",
    "load_graph_profile",
    "device",
    "partitioning_dry_run_np",
    "partitioning_dry_run_cluster",
}
#: Items that work and cannot change a plan: they change what is written, told, kept or waited for.
NOT_PLAN_AFFECTING = {
    *ELASTIC,
    "offload_dir",
    "transport",
    "consolidate_grads",
    "save_deployment",
    "deployment_file",  # its content, not its name, matters, and that only with load_deployment
    "save_graph_profile",
    "graph_profile_file",
    "show_config_items",
    "run_watchdog",
    "watchdog_timeout_s",
    "wait_notice_s",
    "check_nan",
    "verify_partitioning",
    "verify_trace",
    "verify_step",
    "verify_recomp",
    "dump_graph",
    "dump_graph_prefix",
    "trace_events",
    "event_trace_file",
    "calibrate_after",
    "replan",
    "cache",
    "cache_max_gb",
    "daemon_idle_s",
    "daemon_timeout_s",
    "log_level",
    # rannc-run's own: how a job is started, watched and shown
    "nproc",
    "hosts",
    "hostfile",
    "log_dir",
    "show_ranks",
    "grace_period",
    "timeout_start",
    "tune",
    "preflight",
}


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The file of an environment whose RANNC_CONF_DIR is `tmp_path`."""
    return tmp_path / "rannc_conf.toml"


def env(conf: Path, **variables: str) -> dict[str, str]:
    return {"RANNC_CONF_DIR": str(conf.parent), **variables}


# --- the table ------------------------------------------------------------------------------------


def test_all_items_of_rannc_are_known() -> None:
    assert sorted(ITEMS) == sorted(UPSTREAM + OWN)


def test_every_item_is_classified() -> None:
    without_effect = {name for name, row in ITEMS.items() if row.no_effect is not None}
    assert {name for name, row in ITEMS.items() if row.plan_affecting} == PLAN_AFFECTING
    assert set(ITEMS) - PLAN_AFFECTING - without_effect == NOT_PLAN_AFFECTING
    assert not without_effect & PLAN_AFFECTING


def test_every_field_is_an_item_of_the_type_it_declares() -> None:
    hints = typing.get_type_hints(Config)
    assert {field.name for field in dataclasses.fields(Config)} - set(ITEMS) == {"_origins"}
    assert {name: row.type for name, row in ITEMS.items()} == {name: hints[name] for name in ITEMS}


def test_an_item_cannot_be_declared_without_classification() -> None:
    with pytest.raises(TypeError, match="plan_affecting"):
        item(1, "help", group="g")  # type: ignore[call-arg]


def test_default_paths_are_not_below_tmp() -> None:
    assert [name for name, row in ITEMS.items() if str(row.default).startswith("/")] == []


def test_plan_items_hold_all_that_can_change_a_plan() -> None:
    assert Config(mem_margin=0.2).plan_items() == {
        name: 0.2 if name == "mem_margin" else ITEMS[name].default for name in ITEMS if name in PLAN_AFFECTING
    }


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().partition_num = 2  # type: ignore[misc]


# --- where values come from -----------------------------------------------------------------------


def test_defaults_where_the_directory_holds_no_file(conf: Path) -> None:
    config = load(env(conf))
    assert config == Config()
    assert {config.origin(name) for name in ITEMS} == {"default"}


def test_defaults_where_the_default_directory_is_missing(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert config_directory(home) == tmp_path / ".pyrannc"
    assert load(home) == Config()


def test_default_directory_is_read(tmp_path: Path) -> None:
    (tmp_path / ".pyrannc").mkdir()
    (tmp_path / ".pyrannc" / "rannc_conf.toml").write_text("partition_num = 3\n")
    assert load({"HOME": str(tmp_path)}).partition_num == 3


def test_variable_goes_before_file_and_file_before_default(conf: Path) -> None:
    conf.write_text("# why\npartition_num = 2\n\nmem_margin = 0.25\n")
    config = load(env(conf, RANNC_MEM_MARGIN="0.5"))
    assert (config.partition_num, config.mem_margin, config.replica_num) == (2, 0.5, 0)
    assert config.origin("partition_num") == f"{conf}:2"
    assert config.origin("mem_margin") == "RANNC_MEM_MARGIN"
    assert config.origin("replica_num") == "default"


def test_named_file_goes_before_the_one_in_the_directory(conf: Path, tmp_path: Path) -> None:
    conf.write_text("partition_num = 2\n")
    other = tmp_path / "other.toml"
    other.write_text("replica_num = 2\n")
    config = load(env(conf), other)
    assert (config.partition_num, config.replica_num, config.origin("replica_num")) == (0, 2, f"{other}:1")


def test_process_environment_is_read_where_none_is_given(conf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf.write_text("partition_num = 2\n")
    monkeypatch.setenv("RANNC_CONF_DIR", str(conf.parent))
    monkeypatch.setenv("RANNC_REPLICA_NUM", "4")
    assert (load().partition_num, load().replica_num) == (2, 4)


@pytest.mark.parametrize("text", ["true", "1", "yes", "on", "TRUE", "Yes", " on "])
def test_true_in_a_variable(conf: Path, text: str) -> None:
    assert load(env(conf, RANNC_CHECKPOINTING=text)).checkpointing is True


@pytest.mark.parametrize("text", ["false", "0", "no", "off", "False", "OFF"])
def test_false_in_a_variable(conf: Path, text: str) -> None:
    conf.write_text("checkpointing = true\n")
    assert load(env(conf, RANNC_CHECKPOINTING=text)).checkpointing is False


@pytest.mark.parametrize(("text", "value"), [("1", "true"), ("Yes", "true"), ("off", "false"), ("auto", "auto")])
def test_choices_with_true_and_false_take_the_words_of_a_switch(conf: Path, text: str, value: str) -> None:
    assert load(env(conf, RANNC_OFFLOAD_OPTIMIZER=text)).offload_optimizer == value
    with pytest.raises(ConfigError, match=r'RANNC_OFFLOAD_OPTIMIZER: .* must be one of "auto", "true", "false"'):
        load(env(conf, RANNC_OFFLOAD_OPTIMIZER="2"))
    conf.write_text("offload_optimizer = true\n")
    assert load(env(conf)).offload_optimizer == "true"
    assert Config().replace(offload_optimizer=False).offload_optimizer == "false"
    with pytest.raises(ConfigError, match="zero_stage = true, but"):
        Config().replace(zero_stage=True)


def test_whole_number_is_fine_where_a_number_is_wanted(conf: Path) -> None:
    conf.write_text("mem_limit_gb = 40\n")
    limit = load(env(conf)).mem_limit_gb
    assert limit == 40.0
    assert type(limit) is float
    assert type(Config(mem_limit_gb=40).mem_limit_gb) is float
    assert type(load(env(conf, RANNC_MEM_LIMIT_GB="0.5")).mem_limit_gb) is float


def test_replace_checks_and_knows_its_origin(conf: Path) -> None:
    conf.write_text("mem_margin = 0.25\n")
    config = load(env(conf)).replace(partition_num=2)
    assert (config.partition_num, config.mem_margin) == (2, 0.25)
    assert (config.origin("partition_num"), config.origin("mem_margin")) == ("set in code", f"{conf}:1")
    with pytest.raises(ConfigError, match=r"set in code: mem_margin = 2.0, but mem_margin must be a number"):
        config.replace(mem_margin=2)
    with pytest.raises(ConfigError, match="no item is named patition_num; the nearest is partition_num"):
        config.replace(patition_num=2)


def test_construction_checks_too() -> None:
    assert Config(partition_num=2).origin("partition_num") == "set in code"
    with pytest.raises(ConfigError, match='decomposer = "metis", but decomposer must be one of "ml_part"'):
        Config(decomposer="metis")


def test_origin_of_an_unknown_item() -> None:
    with pytest.raises(ConfigError, match="nearest is mem_margin"):
        Config().origin("mem_margins")


def test_lines_show_value_and_origin(conf: Path) -> None:
    conf.write_text('device = "cpu"\n')
    lines = load(env(conf, RANNC_CACHE="off")).lines()
    assert len(lines) == len(ITEMS)
    assert f'device = "cpu"  # {conf}:1' in lines
    assert 'cache = "off"  # RANNC_CACHE' in lines
    assert "mem_margin = 0.1  # default" in lines


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nmem_margin = 1.5", "{conf}:2: mem_margin = 1.5, but mem_margin must be a number, 0 or more and below 1"),
        ("mem_margin = 1", "{conf}:1: mem_margin = 1.0, but mem_margin must be a number, 0 or more and below 1"),
        ("mem_limit_gb = nan", "{conf}:1: mem_limit_gb = nan, but mem_limit_gb must be a number, 0 or more"),
        ("mem_limit_gb = inf", "{conf}:1: mem_limit_gb = inf, but mem_limit_gb must be a number, 0 or more"),
        ("mem_limit_gb = true", "{conf}:1: mem_limit_gb = true, but mem_limit_gb must be a number, 0 or more"),
        ("partition_num = true", "{conf}:1: partition_num = true, but partition_num must be a whole number, 0 or more"),
        ("partition_num = 2.0", "{conf}:1: partition_num = 2.0, but partition_num must be a whole number, 0 or more"),
        ("partition_num = -1", "{conf}:1: partition_num = -1, but partition_num must be a whole number, 0 or more"),
        ("checkpointing = 1", "{conf}:1: checkpointing = 1, but checkpointing must be true or false"),
        ("deployment_file = 3", "{conf}:1: deployment_file = 3, but deployment_file must be a string"),
        ("cache = 'of'", '{conf}:1: cache = "of", but cache must be one of "on", "off", "readonly", "refresh"'),
        ("[plan]\npartition_num = 2", "{conf}:1: a table [plan]; items stand at the top of the file, in no table"),
        ("a = 1\nmem_margn = 0.1", "{conf}:1: no item is named a; the nearest is "),
        ("mem_margin = 0.2\nmem_margn = 0.1", "{conf}:2: no item is named mem_margn; the nearest is mem_margin"),
        ("partition_num = 1\npartition_num = ", "{conf}:2: not TOML: "),
        ("partition_num = 1\n\npartition_num = 2", "{conf}:3: not TOML: "),
        ("x = [\n1,\n", "{conf}:3: not TOML: "),
        ("min_pipeline = 8\nmax_pipeline = 4", "min_pipeline = 8 ({conf}:1) is above max_pipeline = 4 ({conf}:2); "),
        ("max_partition_num = 4", "min_partition_num = 5 (default) is above max_partition_num = 4 ({conf}:1); "),
        ("save_deployment = true", "save_deployment = true ({conf}:1), but deployment_file is empty; set "),
        ("load_deployment = true", "load_deployment = true ({conf}:1), but deployment_file is empty; set "),
        (
            "save_graph_profile = true",
            "save_graph_profile = true ({conf}:1), but graph_profile_file is empty; set ",
        ),
        (
            "load_graph_profile = true",
            "load_graph_profile = true ({conf}:1), but graph_profile_file is empty; set ",
        ),
        (
            'partitioning_dry_run_cluster = "cpu"',
            'partitioning_dry_run_cluster = "cpu" ({conf}:1), but partitioning_dry_run_np is 0; set it to the number ',
        ),
        ("dump_graph = true", "dump_graph = true ({conf}:1), but dump_graph_prefix is empty; set "),
    ],
)
def test_wrong_file(conf: Path, text: str, message: str) -> None:
    conf.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(env(conf))
    assert str(error.value).startswith(message.format(conf=conf))


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("RANNC_MEM_MARGIN", "", 'RANNC_MEM_MARGIN: mem_margin = "", but mem_margin must be a number'),
        ("RANNC_MEM_MARGIN", "much", 'RANNC_MEM_MARGIN: mem_margin = "much", but mem_margin must be a number'),
        ("RANNC_MEM_LIMIT_GB", "nan", "RANNC_MEM_LIMIT_GB: mem_limit_gb = nan, but mem_limit_gb must be a number"),
        ("RANNC_PARTITION_NUM", "2.0", 'RANNC_PARTITION_NUM: partition_num = "2.0", but partition_num must be a whole'),
        ("RANNC_PARTITION_NUM", "-1", "RANNC_PARTITION_NUM: partition_num = -1, but partition_num must be a whole"),
        ("RANNC_CHECKPOINTING", "2", 'RANNC_CHECKPOINTING: checkpointing = "2", but checkpointing must be true or'),
        ("RANNC_DEVICE", "gpu", 'RANNC_DEVICE: device = "gpu", but device must be one of "auto", "cpu", "cuda"'),
        ("RANNC_PARTITON_NUM", "2", "RANNC_PARTITON_NUM=2: no item has this variable; the nearest is RANNC_PARTITION"),
        ("RANNC_CONFDIR", "/x", "RANNC_CONFDIR=/x: no item has this variable; the nearest is RANNC_CONF_DIR"),
        ("RANNC_partition_num", "2", "RANNC_partition_num=2: no item has this variable; the nearest is "),
    ],
)
def test_wrong_variable(conf: Path, variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(env(conf, **{variable: text}))
    assert str(error.value).startswith(message)


def test_other_variables_are_none_of_ours(conf: Path) -> None:
    assert load(env(conf, RANND_WATCHER="x", RANNCX="y", HOME="/")) == Config()


def test_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    with pytest.raises(ConfigError, match=r"no home directory for ~/.pyrannc; set RANNC_CONF_DIR"):
        load({})


def test_wrong_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RANNC_CONF_DIR=.*missing does not exist; create it"):
        load({"RANNC_CONF_DIR": str(tmp_path / "missing")})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"RANNC_CONF_DIR=.*file is not a directory"):
        load({"RANNC_CONF_DIR": str(tmp_path / "file")})
    with pytest.raises(ConfigError, match="RANNC_CONF_DIR is empty"):
        load({"RANNC_CONF_DIR": ""})


def test_unreadable_files(conf: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: there is no such file"):
        load(env(conf), tmp_path / "absent.toml")
    conf.symlink_to(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=r"rannc_conf.toml: there is no such file"):
        load(env(conf))
    conf.unlink()
    conf.write_bytes(b"# fine\n# \xe9\n")
    with pytest.raises(ConfigError, match=rf"{conf}:2: not UTF-8 text \(byte 0xe9\)"):
        load(env(conf))
    conf.unlink()
    conf.mkdir()
    with pytest.raises(ConfigError, match=r"rannc_conf.toml: cannot be read: Is a directory"):
        load(env(conf))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_file_without_permission(conf: Path) -> None:
    conf.write_text("partition_num = 1\n")
    conf.chmod(0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        load(env(conf))


# --- items without effect -------------------------------------------------------------------------


def test_items_without_effect_say_so_when_set(conf: Path) -> None:
    conf.write_text("\nauto_parallel = true\np2p_comm = true\npartition_num = 2\n")
    assert load(env(conf, RANNC_WATCHDOG_LOCKFILE_DIR="")).no_effect_warnings() == [
        f"item auto_parallel is set ({conf}:2) but has no effect in rannd: RaNNC does not read it either",
        "item watchdog_lockfile_dir is set (RANNC_WATCHDOG_LOCKFILE_DIR) but has no effect in rannd: "
        "ranks watch each other over sockets, without files",
    ]


def test_nothing_set_nothing_said(conf: Path) -> None:
    assert load(env(conf)).no_effect_warnings() == []


def test_example_of_rannc_manual_is_read(conf: Path) -> None:
    conf.write_text(
        'profiling=false\ndump_graph=false\ndump_graph_prefix="graph_dump"\npartition_num=2\nreplica_num=1\n'
        "pipeline_num=1\nvalidate_comm=false\ndisplay_comm_value=false\nprofiling_iter=1\nconsolidate_grads=false\n"
        "checkpointing=true\ncheckpointing_no_last=false\nauto_parallel=false\np2p_comm=true\nopt_param_factor=2\n"
        "min_partition_num=5\nmax_partition_num=30\nmem_margin=0.1\ndo_uncoarsening=true\nmin_pipeline=1\n"
        "max_pipeline=4\nsave_deployment=true\nload_deployment=false\nsave_graph_profile=false\n"
        "load_graph_profile=false\ntrace_events=false\nverify_recomp=false\ncoarsen_by_time=false\n"
        "skip_grad_scaling=false\n"
    )
    config = load(env(conf, RANNC_DEPLOYMENT_FILE="plan.bin"))
    assert (config.partition_num, config.max_partition_num, config.coarsen_by_time) == (2, 30, False)
    assert config.trace_events == "false"
    assert [line.split()[1] for line in config.no_effect_warnings()] == ["skip_grad_scaling"]


# --- lines of a file ------------------------------------------------------------------------------


def test_lines_of_keys_and_tables(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(
        "a = '''\nb = 1\n'''\n"  # lines 1 to 3: the b in it is no key
        '"b" = [ # comment\n  1,\n  2 ]\n'  # 4 to 6
        "# c = 1\n"
        "c.d = 2\r\n"  # 8
        "\n[[sink]]\nname = 'x'\n"  # 10, 11
        "[[sink]]\n  name = 'y'\n"  # 12, 13
        "[ t . u ]\nv = { w = 1 }\n"  # 14, 15
    )
    toml = TomlFile(path)
    places = [("a",), ("b",), ("c",), ("sink", 0), ("sink", 0, "name"), ("sink", 1, "name"), ("t", "u", "v")]
    assert [toml.where(*place) for place in places] == [f"{path}:{line}" for line in (1, 4, 8, 10, 11, 13, 15)]
    assert toml.where("sink", 1, "absent") == f"{path}:12"
    assert toml.where("t", "u", "v", "w") == f"{path}:15"
    assert toml.where("absent") == str(path)


_scalars = st.one_of(st.integers(-9, 9), st.booleans(), st.text(st.characters(exclude_categories=["Cs"]), max_size=8))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.from_regex(r"[a-z]{1,5}", fullmatch=True), _scalars, min_size=1), st.randoms())
def test_every_key_has_its_line(tmp_path: Path, values: dict[str, object], random) -> None:  # type: ignore[no-untyped-def]
    lines: list[str] = []
    expected = {}
    for name, value in values.items():
        lines += random.choice([[], [""], ["# x = 1"], ["  "]])
        expected[name] = len(lines) + 1
        lines.append(f"{name} = {toml_text(value)}" if not isinstance(value, str) else f"{name} = '''")
        if isinstance(value, str):
            lines += ["zz = 1", "[head]", "'''"]
    path = tmp_path / "x.toml"
    path.write_text("\n".join(lines))
    toml = TomlFile(path)
    assert {name: toml.where(name) for name in values} == {name: f"{path}:{line}" for name, line in expected.items()}


# --- what is written about the items --------------------------------------------------------------


def test_conf_file_is_true(conf: Path) -> None:
    text = (ROOT / document.CONF).read_text()
    assert text == document.conf_text(), "run python -m rannd.config.document"
    assert tomli.loads(text) == {name: row.default for name, row in ITEMS.items()}
    conf.write_text(text)
    config = load(env(conf))
    assert config == Config()
    assert config.no_effect_warnings() == []
    for row in ITEMS.values():
        assert row.help.split()[0] in text


def test_page_is_true() -> None:
    page = (ROOT / document.PAGE).read_text()
    assert page == document.page_text(page), "run python -m rannd.config.document"
    for name in ITEMS:
        assert page.count(f"| `{name}` |") == 1


def test_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="items: begin"):
        document.page_text("# Configuration\n")


def test_document_writes_both_files(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "docs").mkdir()
    page = (ROOT / document.PAGE).read_text()
    (tmp_path / document.PAGE).write_text(page.replace("| `mem_margin` |", "| `wrong` |"))
    command = [sys.executable, "-m", "rannd.config.document"]
    subprocess.run(command, cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (tmp_path / document.PAGE).read_text() == page
    assert (tmp_path / document.CONF).read_text() == document.conf_text()
    assert sorted(path.name for path in tmp_path.rglob("*.part")) == []


def test_toml_text_round_trips() -> None:
    for value in (True, False, 3, -2, 0.1, 1e300, "", 'a"b\\c\n\x7f ä'):
        assert tomli.loads(f"x = {toml_text(value)}") == {"x": value}


def test_items_of_reads_only_declared_fields() -> None:
    @dataclasses.dataclass
    class Table:
        plain: int = 1
        declared: int = item(2, "help", group="g", plan_affecting=False)

    assert list(items_of(Table)) == ["declared"]


def test_import_reads_and_writes_nothing(tmp_path: Path) -> None:
    """A wrong configuration is no matter of the import, and torch is not loaded by it."""
    code = "import rannd.config, sys; assert 'torch' not in sys.modules"
    environ = {**os.environ, "RANNC_CONF_DIR": str(tmp_path / "missing"), "RANNC_NO_SUCH": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, cwd=ROOT)
    assert list(tmp_path.iterdir()) == []


def test_every_item_that_has_an_effect_is_read_somewhere() -> None:
    """No dead switch: an item that no file reads would be set in vain, and silently."""
    package = ROOT / "rannd"
    texts = [file.read_text() for file in package.rglob("*.py") if "config" not in file.relative_to(package).parts]
    unread = [
        name
        for name, row in ITEMS.items()
        if not row.no_effect and not any(re.search(rf"\b{name}\b", text) for text in texts)
    ]
    assert not unread


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"RANNC_CACHE": "readonly"}, 'cache = "readonly"'),
        ({"RANNC_CALIBRATE_AFTER": "0"}, "calibrate_after = 0"),
        ({"RANNC_TRACE_EVENTS": "off"}, "trace_events = "),
    ],
)
def test_replan_needs_what_is_learned_of_steps(given: dict[str, str], told: str, conf: Path) -> None:
    assert load(env(conf, RANNC_REPLAN="now")).no_effect_warnings() == []
    (line,) = load(env(conf, RANNC_REPLAN="now", **given)).no_effect_warnings()
    assert line.startswith('replan = "now" (RANNC_REPLAN) has no effect with ')
    assert told in line
    assert load(env(conf, **given)).no_effect_warnings() == []
