"""Static analysis of code objects: the names that they refer to, and a digest.

The digest covers bytecode, constants, names and signature, but neither file names nor line numbers.
"""

from __future__ import annotations

import dis
import hashlib
import struct
import types
from dataclasses import dataclass

_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE_WRITES = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_SILENT = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "PUSH_NULL", "RESUME"})
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_ANY_NAME = frozenset({"vars", "dir"})
_ANY_ATTRIBUTE = frozenset({"__dict__", "__getattribute__", "attrgetter", "methodcaller"})
_MOST = 20_000
"""Maximum number of code objects in each of the two caches."""


@dataclass(frozen=True)
class Import:
    """An import statement inside a function: ``from package import names`` with its level of dots."""

    module: str
    level: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """The names that a code object and the code objects nested in it refer to."""

    chains: tuple[tuple[str, ...], ...]
    """Each global name that is read, followed by the attributes read directly from it: (name, attribute, ...)."""
    imports: tuple[Import, ...]
    names: frozenset[str]
    """All attribute names, and string constants that are valid attribute names."""
    reads: frozenset[str]
    """`names` without attributes that are only assigned or deleted."""
    writes: tuple[str, ...]
    """Global names that are assigned or deleted."""
    dynamic: bool
    """Whether attributes are accessed by names that are not constants."""


_known: dict[int, tuple[types.CodeType, Facts]] = {}
_digests: dict[int, tuple[types.CodeType, str]] = {}


def facts_of(code: types.CodeType) -> Facts:
    """Analyse a code object; cached."""
    known = _known.get(id(code))
    if known is None:
        if len(_known) > _MOST:
            _known.clear()
        known = _known[id(code)] = (code, _read(code))
    return known[1]


def digest_of(code: types.CodeType) -> str:
    """Digest of a code object; cached.

    Much cheaper than `facts_of`, which disassembles the bytecode, and all that is needed for library functions.
    """
    known = _digests.get(id(code))
    if known is None:
        if len(_digests) > _MOST:
            _digests.clear()
        known = _digests[id(code)] = (code, _digest(code))
    return known[1]


def names_in(code: types.CodeType) -> set[str]:
    """`Facts.names` of a code object, without the rest of the analysis."""
    names = set(code.co_names)
    for constant in code.co_consts:
        names |= names_in(constant) if isinstance(constant, types.CodeType) else _identifiers(constant)
    return names


def number(value: int | float | complex) -> str:
    """Write a number as text, exact to the last bit and the type: 1, 1.0, True, 0.0 and -0.0 differ."""
    kind = type(value)
    if kind is float:
        return struct.pack(">d", value).hex() + "f"
    if kind is complex:
        return struct.pack(">dd", value.real, value.imag).hex() + "j"
    return f"{value!r}"


def _read(code: types.CodeType) -> Facts:
    chains: dict[tuple[str, ...], None] = {}
    imports: dict[Import, None] = {}
    writes: dict[str, None] = {}
    names = names_in(code)
    dynamic = False
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    for place, step in enumerate(steps):
        if step.opname in _LOADS:
            chain = [str(step.argval)]
            for after in steps[place + 1 :]:
                if after.opname not in _READS:
                    break
                chain.append(str(after.argval))
            chains[tuple(chain)] = None
            dynamic |= chain[0] in _ANY_NAME or (chain[0] in _BY_NAME and not _constant_name(steps, place + 1))
        elif step.opname == "IMPORT_NAME":
            level, wanted = steps[place - 2].argval, steps[place - 1].argval
            imports[Import(str(step.argval), int(level or 0), tuple(wanted or ()))] = None
        elif step.opname in _WRITES:
            writes[str(step.argval)] = None
    reads = {str(step.argval) for step in steps if step.opcode in dis.hasname and step.opname not in _ATTRIBUTE_WRITES}
    dynamic |= not _ANY_ATTRIBUTE.isdisjoint(code.co_names)
    for constant in code.co_consts:
        reads.update(_identifiers(constant))
        if isinstance(constant, types.CodeType):
            inner = facts_of(constant)
            chains.update(dict.fromkeys(inner.chains))
            imports.update(dict.fromkeys(inner.imports))
            writes.update(dict.fromkeys(inner.writes))
            reads |= inner.reads
            dynamic |= inner.dynamic
    return Facts(tuple(chains), tuple(imports), frozenset(names), frozenset(reads), tuple(writes), dynamic)


def _constant_name(steps: list[dis.Instruction], place: int) -> bool:
    """Whether the second argument of a getattr call is a constant string; its first argument starts at steps[place]."""
    if place < len(steps) and steps[place].opname.count("LOAD_") == 1:
        place += 1
        while place < len(steps) and steps[place].opname in _READS:
            place += 1
        if place < len(steps) and steps[place].opname == "LOAD_CONST" and type(steps[place].argval) is str:
            return not _is_part(steps, place)
    return False


def _is_part(steps: list[dis.Instruction], place: int) -> bool:
    """Whether the constant loaded by steps[place] is combined with other values before it is passed to a call."""
    depth = 1  # number of stack entries from the constant to the top
    for step in steps[place + 1 :]:
        name = step.opname
        if "JUMP" in name or depth < 1:
            return False
        if name.startswith(("CALL", "PRECALL")):
            if isinstance(step.arg, int) and step.arg >= depth:
                return False
        elif name == "BUILD_STRING":
            if (step.arg or 0) >= depth:
                return True
        elif (name == "BINARY_OP" and depth <= 2) or (depth == 1 and (name in _READS or name.startswith("FORMAT"))):
            return True
        depth += dis.stack_effect(step.opcode, step.arg, jump=False)
    return False


def _identifiers(constant: object) -> set[str]:
    if type(constant) is str:
        return {constant} if constant.isidentifier() else set()
    if isinstance(constant, (tuple, frozenset)):
        return {name for item in constant for name in _identifiers(item)}
    return set()


def _digest(code: types.CodeType) -> str:
    parts = (
        code.co_qualname,
        f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}",
        code.co_code.hex(),
        code.co_exceptiontable.hex(),
        repr(code.co_names),
        repr(code.co_varnames),
        repr(code.co_freevars),
        repr(code.co_cellvars),
        *map(_constant, code.co_consts),
    )
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return "code " + digest_of(value)
    if isinstance(value, tuple):
        return "(" + ",".join(map(_constant, value)) + ")"
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_constant, value))) + "}"
    if isinstance(value, slice):
        return "slice" + _constant((value.start, value.stop, value.step))
    if isinstance(value, (bool, int, float, complex)):
        return number(value)
    return repr(value)  # None, str, bytes or Ellipsis
