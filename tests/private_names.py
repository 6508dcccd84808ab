"""Finds the private names of torch that files use: names with a component that begins with one underscore.

Three ways of use are found:

- a path that begins at torch: an import, a chain of attributes of something that was imported, a string that holds it
- an attribute of any object, also as a string for getattr and the like, or as a key of `__dict__`
- a word of a string that is one of torch's private names, or a private operator of ATen

Which attributes are torch's is looked up in torch itself: in the modules of `OWNERS` with their classes, and in the
bases of the class whose method reads ``self._attribute``. An attribute that neither torch nor the file itself defines
is told as well: nobody knows whose it is.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PRIVATE = re.compile(r"_(?!_)\w+")
PATH = re.compile(r"\btorch(?:\.\w+)+")
OPERATOR = re.compile(r"(?:aten::)?(_(?!_)\w+)(?:\.\w+)?")
ATTRIBUTE_FUNCTIONS = ("getattr", "setattr", "hasattr", "delattr", "attrgetter", "getattr_static")
OWNERS = (
    "torch",
    "torch._C",
    "torch._ops",
    "torch._subclasses.fake_tensor",
    "torch._tensor",
    "torch.autograd",
    "torch.autograd.function",
    "torch.autograd.graph",
    "torch.autograd.profiler",
    "torch.cuda",
    "torch.cuda.graphs",
    "torch.distributed",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.distributed_c10d",
    "torch.distributions",
    "torch.export",
    "torch.export.exported_program",
    "torch.export.graph_signature",
    "torch.fx",
    "torch.fx.experimental.symbolic_shapes",
    "torch.fx.graph",
    "torch.fx.graph_module",
    "torch.fx.node",
    "torch.library",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.modules.batchnorm",
    "torch.nn.modules.dropout",
    "torch.nn.modules.module",
    "torch.nn.modules.rnn",
    "torch.nn.parameter",
    "torch.nn.utils.clip_grad",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torch.optim.optimizer",
    "torch.overrides",
    "torch.serialization",
    "torch.storage",
    "torch.utils._pytree",
    "torch.utils._python_dispatch",
    "torch.utils._sympy.functions",
    "torch.utils._sympy.symbol",
    "torch.utils.checkpoint",
    "torch.utils.data",
)
"""Modules whose own private names, and those of whose classes, are known as torch's."""


@dataclass(frozen=True)
class Use:
    """A use of a private name: a whole path (``torch._C._swap_tensor_impl``), or an attribute (``_version``)."""

    name: str
    place: str
    """file:line"""

    @property
    def is_path(self) -> bool:
        return "." in self.name


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore and goes on."""
    return PRIVATE.fullmatch(name) is not None


def has_private(path: str) -> bool:
    """Whether a component of a path is private."""
    return any(is_private(part) for part in path.split("."))


def resolve(path: str) -> Any:
    """What a path names. AttributeError or ImportError where there is nothing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ImportError(f"there is no {path}")


@functools.cache
def assigned_in(module: str) -> Mapping[str, frozenset[str]]:
    """Private attributes that the source of a module's classes assigns or annotates, by the class's qualified name."""
    tree = ast.parse(_source(sys.modules[module]) if module in sys.modules else "")
    return {name: frozenset(filter(is_private, own_names(node))) for name, node in classes_of(tree)}


def classes_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """Classes by their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, node
            yield from classes_of(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            yield from classes_of(node, prefix)


def own_names(node: ast.ClassDef) -> set[str]:
    """What a class defines: methods, names at its level, slots, attributes of themselves that its methods assign."""
    found: set[str] = set()
    for each in node.body:
        found |= level_names(each)
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.args.args:
            first = each.args.args[0].arg
            found |= {name for owner, name in assigned(each) if _is_name(owner, first)}
        if isinstance(each, ast.Assign) and any(_is_name(target, "__slots__") for target in each.targets):
            found |= {s.value for s in ast.walk(each.value) if isinstance(s, ast.Constant) and isinstance(s.value, str)}
    return found


def assigned(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """(object, attribute) of each assignment to an attribute, also by way of `__dict__`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.value, node.attr
        elif (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.slice, ast.Constant)
        ):
            held = _dictionary_of(node.value)
            if held is not None:
                yield held, str(node.slice.value)


def level_names(node: ast.stmt) -> set[str]:
    """The names that a statement of a module or a class defines at its level."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    elif isinstance(node, ast.If | ast.Try | ast.For | ast.With):
        return {name for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt) for name in level_names(each)}
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


def private_names_of(cls: type) -> frozenset[str]:
    """Private names that torch's part of a class has: in its dictionary, or assigned in its methods."""
    found: set[str] = set()
    for each in cls.__mro__:
        if (each.__module__ or "").partition(".")[0] == "torch":
            found |= {name for name in vars(each) if is_private(name)}
            found |= assigned_in(each.__module__).get(each.__qualname__, frozenset())
    return frozenset(found)


@functools.cache
def torch_attributes() -> frozenset[str]:
    """Private attributes of objects of torch: what the classes of `OWNERS` have, and what its code gives others."""
    found: set[str] = set()
    for module in map(importlib.import_module, OWNERS):
        for value in list(vars(module).values()):
            if issubclass(type(value), type):  # isinstance would ask torch's deprecated values for their class
                found |= private_names_of(value)
        found |= {name for _, name in assigned(ast.parse(_source(module))) if is_private(name)}  # a dict's _metadata
    return frozenset(found)


@functools.cache
def torch_names() -> frozenset[str]:
    """Those, and private names of the modules themselves."""
    modules = map(importlib.import_module, OWNERS)
    return torch_attributes() | {name for module in modules for name in vars(module) if is_private(name)}


def _source(module: types.ModuleType) -> str:
    """The text of a module, empty where it is not written in Python."""
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


@dataclass
class Class:
    """A class of the project."""

    own: set[str]
    bases: list[str]
    """Paths."""


@dataclass
class File:
    """A file of the project, parsed."""

    place: str
    module: str
    tree: ast.Module
    imported: dict[str, str] = field(default_factory=dict)
    """Path of what each imported name stands for."""
    classes: dict[str, Class] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)
    """Everything that is defined in it, at any level, and attributes that it gives to objects by way of `__dict__`."""

    def __post_init__(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for each in node.names:
                    first = each.name.partition(".")[0]
                    self.imported[each.asname or first] = each.name if each.asname else first
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    self.imported[each.asname or each.name] = f"{node.module}.{each.name}"
            elif isinstance(node, ast.arg):
                self.defined.add(node.arg)
            elif isinstance(node, ast.Subscript):
                self.defined |= {name for _, name in assigned(node)}
            if isinstance(node, ast.stmt):
                self.defined |= level_names(node)
        for name, each in classes_of(self.tree):
            own = own_names(each)
            self.defined |= own
            self.classes[name] = Class(own, [base for base in map(self.path, each.bases) if base])

    def path(self, node: ast.expr) -> str:
        """The path that an expression is, from an imported name or a class of the file; empty where it is none."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if isinstance(node, ast.Subscript) and not parts:
            return self.path(node.value)
        if not isinstance(node, ast.Name):
            return ""
        start = self.imported.get(node.id, "")
        if not start and node.id in self.classes:
            start = f"{self.module}.{node.id}"
        return ".".join([start, *reversed(parts)]) if start else ""


class Project:
    """Files that are looked at together: what one defines is not torch's in another."""

    def __init__(self, sources: Mapping[str, str], other: Iterable[str] = ()) -> None:
        """`sources`: text of each file by its path below the root; `other`: private names that are neither's."""
        self.files = [File(place, _module(place), ast.parse(text)) for place, text in sources.items()]
        self.by_module = {file.module: file for file in self.files}
        self.defined = {name for file in self.files for name in file.defined}
        self.other = frozenset(other)
        for file in self.files:
            for name, path in file.imported.items():
                file.imported[name] = self.origin(path)

    def origin(self, path: str) -> str:
        """Where what a path names comes from, through files of the project that import it."""
        module, _, name = path.rpartition(".")
        file = self.by_module.get(module)
        if file is not None and name not in file.defined and file.imported.get(name, path) != path:
            return self.origin(file.imported[name])
        return path

    def class_at(self, path: str) -> Class | None:
        """The project's class of a path."""
        for length in range(path.count("."), 0, -1):
            module, name = ".".join(path.split(".")[:length]), ".".join(path.split(".")[length:])
            if module in self.by_module:
                return self.by_module[module].classes.get(name)
        return None

    def names_of(self, path: str) -> tuple[set[str], set[str]]:
        """(private names that a class has from torch, names that the project's classes among its bases define)."""
        found = self.class_at(path)
        if found is not None:
            torchs: set[str] = set()
            ours = set(found.own)
            for base in found.bases:
                more, other = self.names_of(base)
                torchs, ours = torchs | more, ours | other
            return torchs, ours
        if path.partition(".")[0] == "torch":
            cls = resolve(path)
            return (set(private_names_of(cls)) if isinstance(cls, type) else set()), set()
        return set(), set()

    def uses(self) -> list[Use]:
        """All uses of private names of torch, and of nobody's."""
        return [use for file in self.files for use in Walk(self, file).uses()]


class Walk(ast.NodeVisitor):
    """Looks at one file."""

    def __init__(self, project: Project, file: File) -> None:
        self.project = project
        self.file = file
        self.found: list[Use] = []
        self.classes: list[str] = []
        self.receivers: dict[str, str] = {}
        """Class of ``self`` and the like, where methods are looked at."""
        self.skipped: set[int] = set()

    def uses(self) -> list[Use]:
        """All uses in the file."""
        self.visit(self.file.tree)
        return self.found

    def note(self, name: str, node: ast.AST) -> None:
        self.found.append(Use(name, f"{self.file.place}:{getattr(node, 'lineno', 0)}"))

    def note_path(self, path: str, node: ast.AST) -> None:
        path = path.rstrip(".")
        if path.partition(".")[0] == "torch" and has_private(path):
            self.note(path, node)

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            self.note_path(each.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            self.note_path(f"{node.module}.{each.name}", node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.classes.append(node.name)
        path = ".".join([self.file.module, *self.classes])
        inherited, _ = self.project.names_of(path)
        for name in sorted(own_names(node) & inherited):
            self.note(name, node)
        before = self.receivers
        for each in node.body:
            self.receivers = dict(before)
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.args.args:
                self.receivers[each.args.args[0].arg] = path
            self.visit(each)
        self.receivers = before
        for other in (*node.bases, *node.keywords, *node.decorator_list):
            self.visit(other)
        self.classes.pop()

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # of a docstring
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.file.path(node)
        if path and path.partition(".")[0] == "torch":
            self.note_path(path, node)
            return
        if is_private(node.attr):
            self.attribute(node.attr, node.value, node)
        self.visit(node.value)

    def attribute(self, name: str, owner: ast.expr, node: ast.AST) -> None:
        """A private attribute of what an expression gives."""
        path = self.file.path(owner)
        if isinstance(owner, ast.Name) and owner.id in self.receivers:
            path = self.receivers[owner.id]
        elif isinstance(owner, ast.Call) and _is_name(owner.func, "super") and self.classes:
            path = ".".join([self.file.module, *self.classes])
        if path and self.project.class_at(path) is not None:
            torchs, ours = self.project.names_of(path)
            if name in torchs:
                self.note(name, node)
                return
            if name in ours or name in self.project.defined:
                return
        elif path and path.partition(".")[0] not in ("torch", *_packages(self.project)):
            return  # of another package's module
        elif path and path in self.project.by_module:
            return
        if name in self.project.other:
            return
        if name in torch_attributes() or name not in self.file.defined:
            self.note(name, node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if function in ATTRIBUTE_FUNCTIONS and node.args:
            named = node.args[-1 if function == "attrgetter" else 1] if len(node.args) > 1 else node.args[0]
            self.key(named, node.args[0])
        elif function == "declare" and len(node.args) > 2:  # of rannd.patches: name, target, attribute
            self.key(node.args[2], node.args[1])
        elif function in ("get", "pop", "setdefault") and node.args and isinstance(node.func, ast.Attribute):
            held = _dictionary_of(node.func.value)
            if held is not None:
                self.key(node.args[0], held)
        for keyword in node.keywords:
            if keyword.arg and is_private(keyword.arg) and keyword.arg not in self.project.defined:
                self.note(keyword.arg, keyword)
        self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> None:
        for name in filter(is_private, node.kwd_attrs):
            self.attribute(name, node.cls, node)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        held = _dictionary_of(node.value)
        if held is not None:
            self.key(node.slice, held)
        self.generic_visit(node)

    def key(self, named: ast.expr, owner: ast.expr) -> None:
        """A string that names an attribute of what `owner` gives."""
        if isinstance(named, ast.Constant) and isinstance(named.value, str) and is_private(named.value):
            self.skipped.add(id(named))
            path = self.file.path(owner)
            if path.partition(".")[0] == "torch":
                self.note_path(f"{path}.{named.value}", named)
            else:
                self.attribute(named.value, owner, named)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(_is_name(target, "__slots__") for target in node.targets):
            return  # looked at with the class
        if isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name | ast.Attribute):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            for each in node.value.args[:1]:  # T = TypeVar("T")
                if isinstance(each, ast.Constant) and each.value in names:
                    self.skipped.add(id(each))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str) or id(node) in self.skipped:
            return
        for path in PATH.findall(node.value):
            self.note_path(path, node)
        for word in PATH.sub(" ", node.value).split():
            found = OPERATOR.fullmatch(word)
            if found is None:
                continue
            if is_operator(found[1]):
                self.note(f"torch.ops.aten.{found[1]}", node)
            elif word in torch_names() - self.project.other:
                self.note(word, node)


@functools.cache
def is_operator(name: str) -> bool:
    """Whether ATen has an operator of this name."""
    import torch

    return hasattr(torch.ops.aten, name)


def lines_of(use: Use, names: Iterable[str]) -> list[str]:
    """Those of the declared `names` that a use is of.

    A path is a use of itself, or of the class or value that it leads through; an attribute is one of every name that
    ends with it.
    """
    if not use.is_path:
        return [name for name in names if name.rpartition(".")[2] == use.name]
    parts = use.name.split(".")
    declared = set(names)
    for length in range(len(parts), 1, -1):
        name = ".".join(parts[:length])
        if name in declared and (length == len(parts) or not _is_module(name)):
            return [name]
        if is_private(parts[length - 1]):
            break  # a private name is a line of its own
    return []


def _is_module(path: str) -> bool:
    try:
        return isinstance(resolve(path), types.ModuleType)
    except (AttributeError, ImportError):
        return False


def _packages(project: Project) -> set[str]:
    return {file.module.partition(".")[0] for file in project.files}


def _module(place: str) -> str:
    parts = Path(place).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _dictionary_of(node: ast.expr) -> ast.expr | None:
    """What an expression is the dictionary of: ``x.__dict__`` or ``vars(x)``."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    if isinstance(node, ast.Call) and _is_name(node.func, "vars") and node.args:
        return node.args[0]
    return None
