"""The built wheel and the source distribution: what they hold, and what works where they are installed.

They are built from a copy of the checkout and installed into empty environments outside of it, without dependencies:
those are the ones of the environment that runs the tests, which is behind the new one's own packages on Python's path.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import rannd
from rannd.config import ITEMS
from rannd.config.cluster import cluster_names

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sysconfig.get_path("scripts")
NOT_COPIED = shutil.ignore_patterns(".*", "tests", "build", "dist", "*.egg-info", "__pycache__")
DATA = {
    file.relative_to(ROOT): file.read_bytes()
    for folder in ("conf", "systemd")
    for file in sorted((ROOT / folder).rglob("*"))
    if file.is_file()
}
COMMANDS = ("rannc-cache", "rannc-run", "rannd")
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"
MODULES = {
    str(file.relative_to(ROOT)) for package in ("rannd", "pyrannc") for file in (ROOT / package).rglob("*.py")
} | {"rannd/py.typed", "pyrannc/py.typed"}
PAGE = {str(file.relative_to(ROOT)) for file in (ROOT / "rannd" / "runner" / "page").glob("page.*")}
"""What pages of plans are made of."""
PACKAGED = MODULES | PAGE | {f"rannd/{path}" for path in DATA}


def bare(**variables: str) -> dict[str, str]:
    """This process's environment without what points to a Python, a checkout or a configuration."""
    pointing = re.compile(r"PYTHON|RANNC_|VIRTUAL_ENV$|COVERAGE_")
    return {name: value for name, value in os.environ.items() if not pointing.match(name)} | variables


def call(*command: str | Path, folder: Path, environment: dict[str, str] | None = None, code: int = 0) -> str:
    """Standard output of a command that stands in `folder` and ends with `code`."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=bare() if environment is None else environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == code, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two files, by kind. setuptools is the tests' own, as pip's --no-build-isolation would have it."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_COPIED)
    (source / "tests").mkdir()
    (source / "tests" / "test_nothing.py").touch()  # setuptools would take it along by itself
    build = "from setuptools import build_meta; build_meta.build_wheel('..'); build_meta.build_sdist('..')"
    call(sys.executable, "-c", build, folder=source)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


class Installed:
    """An environment into which one of the files was installed, alone."""

    def __init__(self, folder: Path, file: Path) -> None:
        self.prefix = folder / "environment"
        self.bin = self.prefix / "bin"
        flags = ["--without-pip"]
        if "include-system-site-packages = true" in Path(sys.prefix, "pyvenv.cfg").read_text():
            flags.append("--system-site-packages")
        call(sys.executable, "-m", "venv", *flags, self.prefix, folder=folder)
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python", "install", "-q")
        call(*pip, "--disable-pip-version-check", "--no-compile", "--no-deps", file, folder=folder)
        self.site = Path(call(self.bin / "python", "-c", PURELIB, folder=folder).strip())
        # A folder that is named here has its packages, and not what it has in development mode, as the checkout.
        others = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        (self.site / "dependencies.pth").write_text("".join(f"{each}\n" for each in others))

    def files(self) -> dict[str, bytes]:
        """Content of every file in site-packages and of the commands that is the same for any environment and build."""
        found = [file for file in self.site.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        told = {"RECORD", "direct_url.json", "dependencies.pth"}
        files = {str(file.relative_to(self.prefix)): file.read_bytes() for file in found if file.name not in told}
        shebang = f"#!{self.bin}/python\n".encode()
        for file in self.bin.iterdir():
            text = file.read_bytes()
            if text.startswith(shebang):
                files[str(file.relative_to(self.prefix))] = text.removeprefix(shebang)
        return files


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """What pip makes of the wheel."""
    return Installed(tmp_path_factory.mktemp("wheel"), built["wheel"])


class User:
    """A user of an environment, with a home of their own, far from the checkout."""

    def __init__(self, installed: Installed, home: Path) -> None:
        self.installed = installed
        self.home = home
        # mpirun is the tests' own, as is the rest of the dependencies.
        path = os.pathsep.join((str(installed.bin), SCRIPTS, os.environ["PATH"]))
        self.environment = bare(HOME=str(home), PATH=path, OMP_NUM_THREADS="1")
        self.environment.pop("XDG_CONFIG_HOME", None)

    def __call__(self, *command: str | Path, code: int = 0, **variables: str) -> str:
        """What a command prints."""
        return call(*command, folder=self.home, environment=self.environment | variables, code=code)


@pytest.fixture
def user(installed: Installed, daemon_home: object, tmp_path: Path) -> User:
    """`daemon_home`: the environment has runtime and cache directories of the test's own."""
    return User(installed, tmp_path)


def test_wheel_holds_the_packages_and_their_data(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        assert held == PACKAGED
        for path, data in DATA.items():
            assert wheel.read(f"rannd/{path}") == data
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        fields = Parser().parsestr(wheel.read(metadata).decode())
        licence = wheel.read(f"{metadata.removesuffix('METADATA')}licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert (fields["License-Expression"], fields["License-File"]) == ("MIT", "LICENSE")
    assert (fields["Name"], fields["Version"]) == ("rannd", rannd.__version__)
    own = [each for each in fields.get_all("Requires-Dist", []) if "extra ==" not in each]
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {_normal(each) for each in own} == {_normal(each) for each in wanted}


def _normal(requirement: str) -> str:
    return str(Requirement(requirement))


def test_pages_of_plans_are_made_of_files_of_the_package() -> None:
    assert {Path(name).suffix for name in PAGE} == {".html", ".css", ".js"}


@pytest.mark.parametrize(
    ("file", "asked", "alone"),
    [
        ("requirements.lock", ("test", "examples"), False),
        ("requirements-frameworks.lock", ("test", "examples", "frameworks"), False),
        ("requirements-docs.lock", ("docs",), True),
        ("requirements-peers.lock", ("peers",), True),  # only what requirements.lock does not have
    ],
)
def test_the_lock_has_what_is_asked_for(file: str, asked: tuple[str, ...], alone: bool) -> None:
    """`make lock` writes it; torch is not in it (CONTRIBUTING.md). `alone`: without the project's own dependencies."""
    lock = (ROOT / file).read_text()
    locked: dict[str, list[Requirement]] = {}
    for entry in re.split(r"^(?=[a-z])", lock, flags=re.MULTILINE)[1:]:
        requirement = Requirement(entry.split(" \\\n")[0])
        assert "--hash=sha256:" in entry, requirement
        locked.setdefault(requirement.name, []).append(requirement)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    own = [] if alone else project["dependencies"]
    for each in map(Requirement, [*own, *(each for extra in asked for each in extras[extra])]):
        if each.name == "torch":
            continue
        for version in locked[each.name]:
            (pin,) = version.specifier
            assert each.specifier.contains(pin.version), f"{each}: {pin}; run make lock"
    assert not {name for name in locked if re.match(r"torch$|triton|nvidia-|cuda-", name)}


def test_source_distribution_holds_pages_and_examples_too(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as sdist:
        members = sdist.getmembers()
        top, held = members[0].name, {each.name.partition("/")[2]: each for each in members if not each.isdir()}
    assert top == f"rannd-{rannd.__version__}"
    assert all(each.isfile() for each in held.values()), "a link does not survive every way of unpacking"
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "SECURITY.md", *map(str, DATA)}
    for folder in ("docs", "examples"):
        found = [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        pages |= {str(path.relative_to(ROOT)) for path in found}
    made = {"PKG-INFO", "setup.cfg", "MANIFEST.in", "pyproject.toml"}
    assert {name for name in held if not name.startswith("rannd.egg-info/")} == PACKAGED | pages | made


def test_both_install_the_same(
    installed: Installed, built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of the source distribution pip makes a wheel, with the setuptools that pyproject.toml asks for.

    That is the newest; torch may want an older one in this environment, which has made the other wheel.
    """
    other = Installed(tmp_path_factory.mktemp("sdist"), built["sdist"])
    files, others = installed.files(), other.files()
    for each in (files, others):
        (wheel,) = (name for name in each if name.endswith(".dist-info/WHEEL"))
        each[wheel] = re.sub(rb"Generator: setuptools \(\S+\)", b"Generator: setuptools", each[wheel])
    assert others == files
    here = installed.site.relative_to(installed.prefix)
    assert {f"bin/{command}" for command in COMMANDS} | {f"{here}/{name}" for name in PACKAGED} <= set(files)
    assert call(other.bin / "rannd", "--version", folder=other.prefix) == f"rannd, version {rannd.__version__}\n"


def test_commands_tell_the_version(user: User) -> None:
    """That of the code, whatever the metadata says: an editable install keeps the metadata of its first day."""
    stale = user.home / "stale" / "rannd-9.9.9.dist-info"
    stale.mkdir(parents=True)
    (stale / "METADATA").write_text("Metadata-Version: 2.1\nName: rannd\nVersion: 9.9.9\n")
    asked = "from importlib.metadata import version; print(version('rannd'))"
    assert user("python", "-c", asked) == f"{rannd.__version__}\n"
    assert user("python", "-c", asked, PYTHONPATH=str(stale.parent)) == "9.9.9\n"
    for command in COMMANDS:
        told = user(user.installed.bin / command, "--version", PYTHONPATH=str(stale.parent))
        assert told == f"{command}, version {rannd.__version__}\n"


def test_samples_clusters_and_units_are_resources_of_the_package(user: User) -> None:
    program = (
        "import sys, importlib.resources as r; p = r.files('rannd'); print(p); "
        "[(p / name).read_bytes() == open(name2, 'rb').read() or sys.exit(name) "
        "for name, name2 in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]"
    )
    pairs = [str(each) for path in DATA for each in (path, ROOT / path)]
    assert Path(user("python", "-c", program, *pairs).strip()) == user.installed.site / "rannd"
    assert {path.parts[0] for path in DATA} == {"conf", "systemd"}
    assert {path.stem for path in DATA if path.parts[:2] == ("conf", "clusters")} == set(cluster_names())


def test_configuration_begins_with_the_sample(user: User) -> None:
    """As docs/configuration.md says; without one, every item has its default."""
    lines = user("rannc-run", "--show-config").splitlines()
    assert [line.partition(" = ")[0] for line in lines] == list(ITEMS)
    assert all(line.endswith("  # default") for line in lines)
    page = (ROOT / "docs" / "configuration.md").read_text()
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    user("bash", "-euc", commands)
    sample = user.home / ".pyrannc" / "rannc_conf.toml"
    text = sample.read_text()
    assert text == (ROOT / "conf" / "rannc_conf.toml").read_text()
    sample.write_text(text.replace("\npartition_num = 0\n", "\npartition_num = 3\n"))
    line = text[: text.index("\npartition_num = ")].count("\n") + 2
    assert f"\npartition_num = 3  # {sample}:{line}\n" in user("rannc-run", "--show-config")


@pytest.mark.ranks
def test_a_cluster_of_the_package_is_planned_for(user: User) -> None:
    """In a job, whose rank imports the installed package, too."""
    tutorial = (ROOT / "examples" / "tutorial.py").read_text()
    (user.home / "train.py").write_text(f"import rannd\nprint(rannd.__file__)\n{tutorial}")
    plan = ("--plan-only", "--cluster", "a100x8", "train.py", "8", "16", "4")
    described = user("rannc-run", "--dry-run", *plan)
    assert (
        f"\n  RANNC_PARTITIONING_DRY_RUN_CLUSTER={user.installed.site}/rannd/conf/clusters/a100x8.toml\n" in described
    )
    told = user("rannc-run", *plan, RANNC_CACHE="off")
    assert f"{user.installed.site}/rannd/__init__.py\n" in told
    assert f"\ntimes     cluster a100x8, by rannd {rannd.__version__} and torch " in told


def test_units_start_the_installed_daemon(user: User) -> None:
    user("rannd", "install-service")
    written = user.home / ".config" / "systemd" / "user"
    assert {each.name for each in written.iterdir()} == {path.name for path in DATA if path.parts[0] == "systemd"}
    assert f'\nExecStart="{user.installed.bin}/rannd" run\n' in (written / "rannd.service").read_text()


def test_daemon_starts_and_ends(user: User) -> None:
    assert user("rannd", "start").startswith(f"rannd {rannd.__version__}, pid ")
    assert user("rannd", "status").startswith(f"rannd {rannd.__version__}, pid ")
    assert user("rannc-cache", "ls").startswith("KIND\tKEY\t")
    assert user("rannd", "stop") == "the daemon has ended\n"
