"""Mutations of plain data: what somebody could write in place of a sound entry of a cache, export or checkpoint.

A mutation changes the structure, not bytes: the data stays msgpack or JSON, and the caller seals it again with the
right checksums, so that it reaches the code behind them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

CANARY = "fuzz_canary"
"""Name that hostile texts use: nothing may import, call or open anything of this name."""

_ENUM = (
    '[1, {"type": "builtins.list", "children_spec": [], '
    f'"context": "{{\\"__enum__\\": true, \\"fqn\\": \\"{CANARY}:X\\", \\"name\\": \\"Y\\"}}"}}]'
)
_DEFAULT = (
    f'[1, {{"type": "collections.defaultdict", "context": {{"default_factory_module": "{CANARY}", '
    '"default_factory_name": "run", "dict_context": []}, "children_spec": []}]'
)
_TEXTS = (
    f"__import__('{CANARY}')",
    f"x={CANARY}.run()",
    f"x): {CANARY}.run(\ndef f(y",
    f"a = {CANARY}.run()",
    f"{CANARY}:run",
    f"..function {CANARY}:Function",
    f"model..{CANARY}",
    f"../../{CANARY}",
    f"/tmp/{CANARY}",
    _ENUM,
    _ENUM.replace('"context": "', '"context": " '),
    _DEFAULT,
    "self",
    "torch",
    "math_floor",
    "to_folder",
    "_\uff3fclass__",
    "wrap",
    "inductor::_reinterpret_tensor",
    "__class__",
    "__reduce__",
    "_parameters",
    "forward",
    "save_pretrained",
    "load_library",
    "attrgetter",
    "system",
    "os",
    "operator",
    "aten::save",
    "aten::from_file",
    "profiler::_record_function_enter_new",
    "placeholder",
    "call_method",
    "call_module",
    "get_attr",
    "output",
    "n",
    "d",
    "Pow",
    "Mod",
    "op",
    "py",
    "hop",
    "",
    ".",
    "class",
    "a" * 70_000,
    "\x00",
    "\udc80",
)
_NUMBERS = (0, 1, -1, 2, 7, 255, 2**31, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 1e308, -0.5, float("nan"), float("inf"))


class Mutator:
    """Mutations from one seed, each of a fresh copy."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def mutated(self, data: Any, most: int = 3) -> Any:
        """A copy of lists, dicts and plain values with one to `most` changes."""
        found = copy.deepcopy(data)
        for _ in range(self._random.randint(1, most)):
            found = self._change(found)
        return found

    def _change(self, data: Any) -> Any:
        places = list(_places(data))
        if not places:
            return self._other(data, [])
        holder, key = self._random.choice(places)
        value = holder[key]
        chance = self._random.random()
        if chance < 0.55:
            holder[key] = self._other(value, places)
        elif chance < 0.65:
            other, at = self._random.choice(places)
            holder[key] = copy.deepcopy(other[at])
        elif chance < 0.75:
            del holder[key]
        elif chance < 0.85 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        elif chance < 0.9 and isinstance(holder, dict) and isinstance(key, str):
            holder[self._random.choice(_TEXTS)] = holder.pop(key)
        elif chance < 0.93:
            deep: Any = value
            for _ in range(self._random.choice((1, 3, 60))):
                deep = [deep]
            holder[key] = deep
        elif chance < 0.96 and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(value) for _ in range(200)]
        else:
            holder[key] = {} if self._random.random() < 0.5 else []
        return data

    def _other(self, value: Any, places: list[tuple[Any, Any]]) -> Any:
        """Another value, of the same type in most cases."""
        chance = self._random.random()
        if isinstance(value, str) and chance < 0.8:
            if chance < 0.25:
                texts = [each for holder, key in places if isinstance(each := holder[key], str)]
                return self._random.choice(texts or [""])
            return self._random.choice(_TEXTS)
        if isinstance(value, bytes) and chance < 0.9:
            return value[: self._random.randint(0, len(value))] + self._random.randbytes(self._random.randint(0, 9))
        if isinstance(value, bool) and chance < 0.7:
            return not value
        if isinstance(value, int | float) and value == value and chance < 0.8:  # not NaN
            return self._random.choice(_NUMBERS) if chance < 0.5 else int(min(abs(value), 2**40)) + 1
        return self._random.choice(
            [None, True, self._random.choice(_NUMBERS), self._random.choice(_TEXTS), [], {}, b"x"]
        )


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each value inside of lists and dicts, as its holder and its key or index there."""
    stack = [data]
    while stack:
        holder = stack.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, value in items:
            yield holder, key
            if isinstance(value, list | dict):
                stack.append(value)
