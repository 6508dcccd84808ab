"""Logging, in real processes: the lines on standard error and in files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rannd import log
from rannd.config import ITEMS
from rannd.errors import ConfigError
from rannd.log import loggers, settings
from rannd.log.pattern import FLAGS, unknown_flag
from rannd.ranks.rank_variables import RANKS

ROOT = Path(__file__).parent.parent
Run = Callable[..., subprocess.CompletedProcess[str]]

_PREFIX = """
import logging, os, sys
from pathlib import Path
from rannd import log
from rannd.config import ITEMS
here = Path({directory!r})
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs code in a new interpreter; `here` is a directory, with `toml` as logging.toml."""

    def run_(code: str, toml: str | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        if toml is not None:
            (tmp_path / "logging.toml").write_text(toml)
        environ = {name: text for name, text in os.environ.items() if name not in RANKS}
        environ |= {"PYTHONPATH": str(ROOT), "RANNC_CONF_DIR": str(tmp_path), **variables}
        command = [sys.executable, "-c", _PREFIX.format(directory=str(tmp_path)) + code]
        return subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path, check=True)

    return run_


@pytest.fixture
def own_process() -> Iterator[None]:
    """Restores the loggers of this process."""
    yield
    base = logging.getLogger("rannd")
    if loggers._handler is not None:
        for logger in loggers._handler.settings.loggers:
            log.get(logger.name).setLevel(logging.NOTSET)
        base.removeHandler(loggers._handler)
        loggers._handler.close()
        loggers._handler = None


def console(pattern: str = "[%n] [%l] %v", loggers: str = "", sink: str = "stderr_sink_mt", **keys: str) -> str:
    """A logging.toml with one sink and a logger root."""
    more = "".join(f"{key} = {value}\n" for key, value in keys.items())
    return (
        f'global_pattern = {json.dumps(pattern)}\n[[sink]]\nname = "s"\ntype = "{sink}"\n{more}'
        f'[[logger]]\nname = "root"\nsinks = ["s"]\nlevel = "trace"\n{loggers}'
    )


# --- lines ----------------------------------------------------------------------------------------


def test_lines_of_the_tutorial_without_a_file(run: Run) -> None:
    result = run(
        "log.setup()\n"
        "log.get('RaNNCModule').info('Tracing model ...')\n"
        "log.get('Decomposer').info(' Assigned subgraph %s to rank[%s]', 'MERGE_0_9', '1,0')\n"
        "log.get('DPStaging').info('Estimated profiles of subgraphs: np=2\\n  graph=MERGE_0_9 repl=2 {} %%d 100%')\n"
        "log.get('DPStaging').debug('not at info')\n"
    )
    assert result.stderr == (
        "[RaNNCModule] [info] Tracing model ...\n"
        "[Decomposer] [info]  Assigned subgraph MERGE_0_9 to rank[1,0]\n"
        "[DPStaging] [info] Estimated profiles of subgraphs: np=2\n  graph=MERGE_0_9 repl=2 {} %%d 100%\n"
    )
    assert result.stdout == ""


def test_the_shipped_file_changes_nothing(run: Run) -> None:
    toml = (ROOT / "conf" / "logging.toml").read_text()
    code = "log.setup()\nfor name in log.LOGGERS:\n  log.get(name).info('x')\n  log.get(name).log(log.DETAIL, 'y')\n"
    lines = [f"[{name}] [info] x" for name in log.LOGGERS]
    assert run(code).stderr.splitlines() == lines
    assert run(code, toml).stderr.splitlines() == lines


def test_a_logger_that_the_file_names_at_info_also_writes_what_ranncs_does(run: Run) -> None:
    """As RaNNC's own file does; root is not a name."""
    named = "".join(
        f'[[logger]]\nname = "{name}"\nsinks = ["s"]\nlevel = "{level}"\n'
        for name, level in (("DPStaging", "info"), ("Decomposer", "warn"))
    )
    code = (
        "log.setup()\nfor name in ('DPStaging', 'Decomposer', 'RaNNCModule'):\n"
        "  log.get(name).log(log.DETAIL, 'x')\n  log.get(name).debug('y')\n"
    )
    root = console().replace('level = "trace"', 'level = "info"')
    assert run(code, root + named).stderr == "[DPStaging] [info] x\n"
    assert run(code.replace("setup()", "setup(level='info')"), root + named).stderr == ""
    told = run(code.replace("setup()", "setup(level='debug')"), root + named).stderr.splitlines()
    assert told.count("[RaNNCModule] [info] x") == told.count("[RaNNCModule] [debug] y") == 1
    assert len(told) == 6


def test_every_level(run: Run) -> None:
    code = "log.setup()\nfor n in (5, 10, 20, 25, 30, 40, 50, 55): log.get('A').log(n, str(n))"
    assert run(code, console("%l %L %v")).stderr.splitlines() == [
        "trace T 5",
        "debug D 10",
        "info I 20",
        "info I 25",
        "warning W 30",
        "error E 40",
        "critical C 50",
        "critical C 55",
    ]


def test_every_flag_of_a_pattern(run: Run) -> None:
    """spdlog knows every flag that logging.toml may use, with the meaning that the documentation gives."""
    pattern = "|".join(f"{ord(flag)}=%{flag}" for flag in sorted(FLAGS))
    line = run("log.setup()\nlog.get('A').info('message')\nprint(os.getpid())", console(pattern), TZ="Asia/Tokyo")
    got = {chr(int(flag)): text for flag, text in re.findall(r"(\d+)=([^|]*)", line.stderr.rstrip("\n"))}
    now = time.time() + 9 * 3600  # the clock of Tokyo
    day = time.gmtime(now)
    shapes = {
        **{"v": "message", "n": "A", "l": "info", "L": "I", "t": r"\d+", "P": line.stdout.strip(), "%": "%"},
        **{"^": "", "$": "", "z": r"\+09:00", "p": "AM|PM", "E": r"\d{10}", "e": r"\d{3}", "f": r"\d{6}"},
        **{"F": r"\d{9}", "H": r"\d\d", "I": r"\d\d", "M": r"\d\d", "S": r"\d\d", "R": r"\d\d:\d\d"},
        **{"T": r"\d\d:\d\d:\d\d", "X": r"\d\d:\d\d:\d\d", "r": r"\d\d:\d\d:\d\d (AM|PM)", "Y": "20[0-9]{2}"},
        **{"C": r"\d\d", "m": r"\d\d", "d": r"\d\d", "D": r"\d\d/\d\d/\d\d", "a": "[MTWFS][a-z]{2}"},
        **{"A": "[MTWFS][a-z]+day", "b": "[JFMASOND][a-z]{2}", "h": "[JFMASOND][a-z]{2}", "B": "[JFMASOND][a-z]{2,}"},
    }
    assert set(got) == set(FLAGS) == set(shapes)
    for flag, shape in shapes.items():
        assert re.fullmatch(shape, got[flag]), (flag, got[flag])
    if day.tm_hour not in (0, 23):  # midnight cannot have passed between the process and here
        assert got["A"] == time.strftime("%A", day)
        assert got["B"] == time.strftime("%B", day)
        assert (got["Y"], got["C"], got["m"], got["d"]) == tuple(time.strftime("%Y %y %m %d", day).split())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("%8l|%-8l|%=9l|", "    info|info    |  info   |"),
        ("%=7l|%2l|%2!l|%-2!l|", " info  |info|in|in|"),
        ("100%% %v %10v%n", "100% message    messageA"),
    ],
)
def test_alignment(run: Run, flags: str, line: str) -> None:
    assert run("log.setup()\nlog.get('A').info('message')", console(flags)).stderr == line + "\n"


def test_patterns_and_levels_of_loggers(run: Run) -> None:
    toml = console(
        "root<%n %v>",
        '[[pattern]]\nname = "short"\nvalue = "%L %v"\n'
        '[[logger]]\nname = "A"\nsinks = ["s"]\nlevel = "err"\npattern = "short"\n'
        '[[logger]]\nname = "Quiet"\nsinks = ["s"]\nlevel = "off"\n'
        '[[logger]]\nname = "None"\nsinks = []\n',
    )
    code = (
        "log.setup()\nfor n in ('A', 'B', 'A.b', 'Quiet', 'None', 'root'):\n  for i in (5, 40): log.get(n).log(i, n)\n"
    )
    assert run(code, toml).stderr.splitlines() == [
        "E A",
        "root<B B>",
        "root<B B>",
        "E A.b",
        "root<root root>",
        "root<root root>",
    ]


def test_level_of_a_sink(run: Run) -> None:
    code = "log.setup()\nfor n in (5, 20, 30): log.get('A').log(n, str(n))"
    assert run(code, console("%v", level='"warn"')).stderr == "30\n"
    assert run(code, console("%v", level='"off"')).stderr == ""


def test_level_for_all(run: Run) -> None:
    code = "log.setup(level={!r})\nfor n in (10, 20, 30): log.get('A').log(n, str(n))"
    toml = console("%v", '[[logger]]\nname = "A"\nsinks = ["s"]\nlevel = "warn"\n')
    assert run(code.format("debug"), toml).stderr == "10\n20\n30\n"
    assert run(code.format(""), toml).stderr == "30\n"
    assert run(code.format("off"), toml).stderr == ""


def test_standard_output(run: Run) -> None:
    for sink in ("stdout_sink_st", "color_stdout_sink_mt"):
        result = run("log.setup()\nlog.get('A').info('x')", console("%^%v%$", sink=sink))
        assert (result.stdout, result.stderr) == ("x\n", "")


def test_sinks_that_show_nothing_here(run: Run) -> None:
    result = run("log.setup()\nlog.get('A').info('x')", console(sink="null_sink_mt"))
    assert (result.stdout, result.stderr) == ("", "")
    result = run("log.setup()\nlog.get('A').info('x')", console(sink="syslog_sink_mt", ident='"rannd-test"'))
    assert (result.stdout, result.stderr) == ("", "")


def test_colors_on_a_terminal_only(run: Run, tmp_path: Path) -> None:
    toml = console("%^%l%$ %v", sink="color_stderr_sink_mt")
    code = "log.setup()\nlog.get('A').warning('x')"
    assert run(code, toml).stderr == "warning x\n"
    ours, theirs = pty.openpty()
    code = _PREFIX.format(directory=str(tmp_path)) + code
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANNC_CONF_DIR": str(tmp_path), "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=theirs, env=environ, cwd=tmp_path, check=True)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert re.fullmatch(rb"(\x1b\[\d*m)+warning(\x1b\[\d*m)+ x\r\n", shown), shown


def test_tracebacks_and_odd_text(run: Run) -> None:
    result = run(
        "log.setup()\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: log.get('A').exception('failed')\n"
        "log.get('A').info('na\\u00efve \\udcff')\n",
        PYTHONIOENCODING="utf-8",
    )
    lines = result.stderr.splitlines()
    assert lines[0] == "[A] [error] failed"
    assert lines[1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ZeroDivisionError: division by zero", "[A] [info] naïve \\udcff"]


# --- Python's side --------------------------------------------------------------------------------


def test_import_and_get_do_nothing(run: Run) -> None:
    result = run(
        "log.get('A').info('x')\n"
        "base = logging.getLogger('rannd')\n"
        "print(base.handlers, base.level, logging.getLogger().handlers, logging.getLevelName(5))\n"
        "print(list(here.iterdir()))\n"
        "print('spdlog' in sys.modules, 'torch' in sys.modules)\n",
        RANNC_CONF_DIR="/does/not/exist",
    )
    assert result.stdout == "[] 0 [] Level 5\n[]\nFalse False\n"
    assert result.stderr == ""


def test_setup_again(run: Run) -> None:
    code = (
        "for i in range(3): log.setup()\n"
        "log.get('A').info('1')\n"
        "log.setup(level='debug')\n"
        "log.get('A').debug('2')\n"
        "(here / 'logging.toml').write_text('[[logger]]\\nname = \"A\"\\nsinks = []\\n')\n"
        "log.setup()\n"
        "log.get('A').error('into no sink')\n"
        "log.get('B').debug('info holds again')\n"
        "(here / 'logging.toml').unlink()\n"
        "log.setup()\n"
        "log.get('A').info('3')\n"
        "print(len(logging.getLogger('rannd').handlers))\n"
    )
    result = run(code)
    assert result.stderr == "[A] [info] 1\n[A] [debug] 2\n[A] [info] 3\n"
    assert result.stdout == "1\n"


def test_a_failed_setup_leaves_what_was(run: Run) -> None:
    code = (
        "log.setup()\n"
        "(here / 'logging.toml').write_text('x = 1')\n"
        "from rannd.errors import ConfigError\n"
        "try: log.setup()\n"
        "except ConfigError: log.get('A').info('still')\n"
    )
    assert run(code).stderr == "[A] [info] still\n"


def test_setup_without_spdlog_says_what_to_install(run: Run) -> None:
    code = (
        "sys.modules['spdlog'] = None\n"  # an import of it fails now, as if it were not installed
        "from rannd.errors import ConfigError\n"
        "try: log.setup()\n"
        "except ConfigError as error: kept = error; print(error)\n"  # and with it the frames, and what is in them
        "print(logging.getLogger('rannd').handlers)\n"
        "del sys.modules['spdlog']\n"
        "log.setup()\n"
        "log.get('A').info('x')\n"
    )
    result = run(code)
    error, handlers = result.stdout.splitlines()
    assert error.startswith("the package spdlog, which writes the log, cannot be imported: ")
    assert "pip install spdlog" in error
    assert (handlers, result.stderr) == ("[]", "[A] [info] x\n")


def test_a_users_own_root_handler_sees_each_record_once(run: Run) -> None:
    code = (
        "logging.basicConfig(stream=sys.stdout, level='INFO', format='mine %(name)s %(message)s')\n"
        "log.setup()\n"
        "log.get('A').info('x')\n"
        "log.get('root').info('y')\n"
    )
    result = run(code)
    assert result.stdout == "mine rannd.A x\nmine rannd y\n"
    assert result.stderr == "[A] [info] x\n[root] [info] y\n"


@pytest.mark.usefixtures("own_process")
def test_caplog_sees_the_records(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log.setup(tmp_path)
    log.get("RaNNCModule").info("Tracing model ...")
    log.get("RaNNCModule").debug("below")
    assert caplog.record_tuples == [("rannd.RaNNCModule", logging.INFO, "Tracing model ...")]
    assert capfd.readouterr().err == "[RaNNCModule] [info] Tracing model ...\n"


# --- files ----------------------------------------------------------------------------------------


def file_sink(kind: str = "basic_file_sink_mt", name: str = "filename = 'x.{rank}.log'", more: str = "") -> str:
    return (
        f'global_pattern = "%v"\n[[sink]]\nname = "f"\ntype = "{kind}"\n{name}\n{more}\n'
        '[[logger]]\nname = "root"\nsinks = ["f"]\n'
    )


@pytest.mark.parametrize(
    ("variables", "role", "name"),
    [
        ({"OMPI_COMM_WORLD_RANK": "3", "SLURM_PROCID": "0"}, "", "x.3.log"),
        ({"PMI_RANK": "2"}, "", "x.2.log"),
        ({"RANK": "1"}, "", "x.1.log"),
        ({"RANK": "1"}, "runner", "x.runner-p{pid}.log"),
        ({}, "", "x.p{pid}.log"),
    ],
)
def test_a_file_for_each_process(run: Run, tmp_path: Path, variables: dict[str, str], role: str, name: str) -> None:
    code = f"log.setup(role={role!r})\nlog.get('A').info('x')\nprint(os.getpid())"
    result = run(code, file_sink(), **variables)
    assert (tmp_path / name.format(pid=result.stdout.strip())).read_text() == "x\n"
    assert result.stderr == ""


def test_append_and_truncate(run: Run, tmp_path: Path) -> None:
    code = "log.setup()\nlog.get('A').info('x')\nlog.setup()\nlog.get('A').info('y')\n"
    for _ in range(2):
        run(code, file_sink(), RANK="0")
    assert (tmp_path / "x.0.log").read_text() == "x\ny\nx\ny\n"
    run(code, file_sink(more="truncate = true"), RANK="0")
    assert (tmp_path / "x.0.log").read_text() == "x\ny\n"


def test_a_file_that_is_rotated_from_outside_is_made_again(run: Run, tmp_path: Path) -> None:
    """As by logrotate: later lines went to the file that was moved, or nowhere."""
    code = (
        "log.setup()\na = log.get('A')\na.info('1')\na.warning('2')\n"
        "os.rename(here / 'x.0.log', here / 'x.0.log.1')\na.info('3')\nlog.get('B').info('4')\n"
        "logging.shutdown()\nos.unlink(here / 'x.0.log')\na.info('5')\n"
    )
    result = run(code, file_sink(more="truncate = true"), RANK="0")
    assert (tmp_path / "x.0.log.1").read_text() == "1\n2\n"
    assert (tmp_path / "x.0.log").read_text() == "5\n"
    assert result.stderr == ""


def test_warnings_reach_the_file_though_the_process_dies(run: Run, tmp_path: Path) -> None:
    code = "log.setup()\nlog.get('A').info('x')\nlog.get('A').warning('y')\nsys.stdout.flush()\nos._exit(0)"
    run(code, file_sink(), RANK="0")
    assert (tmp_path / "x.0.log").read_text() == "x\ny\n"


def test_rotation_by_size(run: Run, tmp_path: Path) -> None:
    name = "base_filename = 'log/x.{rank}.log'\ncreate_parent_dir = true\nmax_size = 100\nmax_files = 2"
    run(
        "log.setup()\nfor i in range(20): log.get('A').info('%030d', i)",
        file_sink("rotating_file_sink_st", name),
        RANK="0",
    )
    names = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert names == ["x.0.1.log", "x.0.2.log", "x.0.log"]
    assert (tmp_path / "log" / "x.0.log").read_text().endswith(f"{19:030}\n")
    assert all(path.stat().st_size <= 100 for path in (tmp_path / "log").iterdir())


def test_a_file_for_each_day(run: Run, tmp_path: Path) -> None:
    days = {time.strftime("%Y-%m-%d")}
    run(
        "log.setup()\nlog.get('A').info('x')",
        file_sink("daily_file_sink_mt", "base_filename = 'x.{rank}.log'"),
        RANK="0",
    )
    days.add(time.strftime("%Y-%m-%d"))
    (file,) = tmp_path.glob("x*.log")
    assert file.name in {f"x.0_{day}.log" for day in days}
    assert file.read_text() == "x\n"


def test_a_forked_child_writes_a_file_of_its_own(run: Run, tmp_path: Path) -> None:
    code = (
        "log.setup()\n"
        "log.get('A').info('before')\n"
        "pid = os.fork()\n"
        "log.get('A').info('child' if pid == 0 else 'parent')\n"
        "if pid: os.waitpid(pid, 0); print(pid)\n"
    )
    child = run(code, file_sink(), RANK="0").stdout.strip()
    assert (tmp_path / "x.0.log").read_text() == "before\nparent\n"
    assert (tmp_path / f"x.0-p{child}.log").read_text() == "child\n"


def test_two_ranks_share_a_directory_and_no_file(run: Run, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        run(f"log.setup()\nlog.get('A').info('rank {rank}')", file_sink(), OMPI_COMM_WORLD_RANK=rank)
    assert {path.name: path.read_text() for path in tmp_path.glob("x*")} == {
        "x.0.log": "rank 0\n",
        "x.1.log": "rank 1\n",
    }


# --- errors ---------------------------------------------------------------------------------------

_SINK = '[[sink]]\nname = "s"\ntype = "stderr_sink_mt"\n'
_LOGGER = '[[logger]]\nname = "root"\n'


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("x = [", "{file}:1: not TOML: "),
        ('global_patern = "%v"', "{file}:1: the file: unknown key global_patern; the nearest is global_pattern"),
        ("global_pattern = 3", "{file}:1: the file: global_pattern = 3, but global_pattern must be a string"),
        ('global_pattern = "%v %Q"', '{file}:1: the file: global_pattern = "%v %Q" has the unknown flag %Q; known'),
        ('global_pattern = "50%"', '{file}:1: the file: global_pattern = "50%" has the unknown flag %; known flags'),
        ("sink = 3", "{file}:1: the file: sink must be tables, each under a line [[sink]]"),
        ('[sink]\nname = "x"', "{file}:1: the file: sink must be tables, each under a line [[sink]]"),
        ('\n[[sink]]\nname = "s"', "{file}:2: [[sink]] s: type is missing; it must be a string"),
        ('[[sink]]\ntype = "null_sink_mt"', "{file}:1: [[sink]]: name is missing; it must be a string"),
        ('[[sink]]\nname = ""', '{file}:2: [[sink]] : name = "", but name must be a non-empty string'),
        (
            '[[sink]]\nname = "s"\ntype = "stdout_sink"',
            '{file}:3: [[sink]] s: type = "stdout_sink", but type must be one of stdout_sink_mt, ',
        ),
        (_SINK + 'filename = "x"', "{file}:4: [[sink]] s: unknown key filename; the nearest is "),
        (_SINK + 'level = "warm"', '{file}:4: [[sink]] s: level = "warm", but level must be one of trace, debug, '),
        (_SINK + "level = 3", "{file}:4: [[sink]] s: level = 3, but level must be a string"),
        (_SINK + _SINK, '{file}:5: [[sink]] s: name = "s" is used twice; rename or remove one'),
        (
            file_sink(name='filename = "log.d/rannd"'),
            '{file}:5: [[sink]] f: filename = "log.d/rannd" is one file for all ranks, and several processes would '
            'corrupt it; use filename = "log.d/rannd.{{rank}}"',
        ),
        (
            file_sink(name='filename = "x.log"'),
            '{file}:5: [[sink]] f: filename = "x.log" is one file for all ranks, and several processes would corrupt '
            'it; use filename = "x.{{rank}}.log"',
        ),
        (file_sink(name=""), "{file}:2: [[sink]] f: filename is missing; it must be a string"),
        (file_sink(more="truncate = 1"), "{file}:6: [[sink]] f: truncate = 1, but truncate must be true or false"),
        (
            file_sink("rotating_file_sink_mt", 'base_filename = "{rank}"'),
            "{file}:2: [[sink]] f: max_size is missing",
        ),
        (
            file_sink("rotating_file_sink_mt", 'base_filename = "{rank}"', 'max_size = "10 MB"'),
            '{file}:6: [[sink]] f: max_size = "10 MB", but max_size must be a number of bytes above 0, or a size ',
        ),
        (
            file_sink("rotating_file_sink_mt", 'base_filename = "{rank}"', "max_size = 10\nmax_files = 0"),
            "{file}:7: [[sink]] f: max_files = 0, but max_files must be a whole number from 1 to 200000",
        ),
        (
            file_sink("daily_file_sink_mt", 'base_filename = "{rank}"', "rotation_hour = 24"),
            "{file}:6: [[sink]] f: rotation_hour = 24, but rotation_hour must be a whole number from 0 to 23",
        ),
        (_SINK + '[[logger]]\nsinks = ["s"]', "{file}:4: [[logger]]: name is missing"),
        (_SINK + _LOGGER, "{file}:4: [[logger]] root: sinks is missing; it must be a list of strings"),
        (
            _SINK + _LOGGER + 'sinks = "s"',
            '{file}:6: [[logger]] root: sinks = "s", but sinks must be a list of strings',
        ),
        (
            _SINK + _LOGGER + 'sinks = ["t"]',
            '{file}:6: [[logger]] root: sinks names "t", which is not a [[sink]]; the ',
        ),
        (
            _LOGGER + 'sinks = ["t"]',
            '{file}:3: [[logger]] root: sinks names "t", which is not a [[sink]]; the file has no',
        ),
        (
            _SINK + _LOGGER + 'sinks = ["s"]\npattern = "%v"',
            '{file}:7: [[logger]] root: pattern = "%v", but the file has no [[pattern]]; add one with this name',
        ),
        (
            '[[pattern]]\nname = "long"\nvalue = "%v"\n' + _SINK + _LOGGER + 'sinks = ["s"]\npattern = "lang"',
            '{file}:10: [[logger]] root: pattern = "lang", but pattern must be the name of a [[pattern]]; the nearest '
            "is long",
        ),
        (
            _SINK + _LOGGER + 'sinks = ["s"]\ntype = "async"',
            '{file}:7: [[logger]] root: type = "async", but type must be one of sync; the nearest is sync',
        ),
        (
            '[[pattern]]\nname = "long"\nvalue = "%n %v"\n'
            + file_sink().replace('global_pattern = "%v"\n', "")
            + '[[logger]]\nname = "A"\nsinks = ["f"]\npattern = "long"',
            "{file}:15: [[logger]] A: loggers root and A write to the file of sink f in two patterns; give them one",
        ),
        (
            file_sink() + '[[sink]]\nname = "g"\ntype = "basic_file_sink_st"\nfilename = "x.{rank}.log"',
            "{file}:10: sinks f and g write to the same file x.{{rank}}.log; give them two files",
        ),
    ],
)
def test_wrong_file(tmp_path: Path, toml: str, message: str) -> None:
    file = tmp_path / "logging.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as error:
        settings.read(file)
    assert str(error.value).startswith(message.format(file=file))


@pytest.mark.usefixtures("own_process")
def test_wrong_level() -> None:
    with pytest.raises(ConfigError, match='"loud" is not a log level; use one of trace, debug'):
        log.setup(ROOT / "conf", level="loud")


def test_file_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    code = "from rannd.errors import ConfigError\ntry: log.setup()\nexcept ConfigError as error: print(error)"
    result = run(code, file_sink(name='filename = "none/x.{rank}"'))
    assert result.stdout == (
        f"{tmp_path}/logging.toml:2: sink f: the directory none does not exist; create it, or set create_parent_dir = "
        "true\n"
    )
    assert not (tmp_path / "none").exists()
    (tmp_path / "x.0").mkdir()
    result = run(code, file_sink(name='filename = "x.{rank}"'), RANK="0")
    assert result.stdout == f"{tmp_path}/logging.toml:2: sink f: x.0 cannot be written; use another file name\n"


@pytest.mark.usefixtures("own_process")
def test_missing_named_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANNC_CONF_DIR", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="does not exist"):
        log.setup()


# --- the files of the manual and of this repository -----------------------------------------------


def test_the_shipped_file_names_no_logger_but_root() -> None:
    shipped = settings.read(ROOT / "conf" / "logging.toml")
    assert [(logger.name, logger.level) for logger in shipped.loggers] == [("root", logging.INFO)]


def test_the_example_of_rannc_manual(run: Run) -> None:
    toml = (
        'global_pattern = "[%Y-%m-%d %T.%f] [%L] <%n>: %v"\n'
        '[[sink]]\nname = "console_st"\ntype = "stdout_sink_st"\n'
        '[[sink]]\nname = "stderr_st"\ntype = "color_stdout_sink_st"\n'
        '[[logger]]\nname = "root"\nsinks = ["console_st"]\nlevel = "info"\n'
        '[[logger]]\nname = "RaNNCModule"\nsinks = ["stderr_st"]\nlevel = "info"\n'
    )
    result = run("log.setup()\nlog.get('RaNNCModule').info('x')\nlog.get('other').info('y')", toml)
    time_ = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]"
    assert re.fullmatch(rf"{time_} \[I\] <RaNNCModule>: x\n{time_} \[I\] <other>: y\n", result.stdout)


SUBJECTS = """
first = log.LogSubject("Net")
def say(subject, what):
    with subject.speaking():
        log.get("RaNNCModule").info(what)
log.setup()
say(first, "alone")
second, third = log.LogSubject("Net"), log.LogSubject("Judge")
for subject in first, second, third:
    say(subject, "of several")
with first.speaking():
    say(second, "inside")
    log.get("RaNNCModule").info("back")
log.get("RaNNCModule").info("of none")
second.end()
del subject, third
say(first, "alone again")
"""


def test_lines_name_their_model_where_there_are_several(run: Run) -> None:
    assert [line.removeprefix("[RaNNCModule] [info] ") for line in run(SUBJECTS).stderr.splitlines()] == [
        "alone",
        "Net: of several",
        "Net 2: of several",
        "Judge: of several",
        "Net 2: inside",
        "Net: back",
        "of none",
        "alone again",
    ]


# --- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["%", "a%", "%j", "%y", "%5", "%100l", "%65v", "%3%", "%-^", "%é"])
def test_unknown_flags(pattern: str) -> None:
    assert unknown_flag(f"%v {pattern}") is not None


@pytest.mark.parametrize("pattern", ["", "%v", "%%", "%%y", "[%n] [%l] %v", "%-64v%=3!l", "%^%L%$"])
def test_known_flags(pattern: str) -> None:
    assert unknown_flag(pattern) is None


def test_get() -> None:
    assert log.get("root") is logging.getLogger("rannd")
    assert log.get("DPStaging") is logging.getLogger("rannd.DPStaging")
    assert log.get("something.else").name == "rannd.something.else"


def test_the_item_log_level_takes_these_levels() -> None:
    assert ITEMS["log_level"].choices == ("", *settings.LEVELS)
