"""Changes of a trace that aim at one of its parts: operators, arguments of leaves, sizes. All of it stays well-formed.

The other mutations (`mutation.py`) rarely give such a part a form that gets far.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import torch
from fuzz.mutation import CANARY

from rannd.graph.stored.encoding import EXPRESSIONS

_SYMBOLS = ("rows", "n0", "n1", "n2", *(f"u{number}" for number in range(12)))


class TraceAttacker:
    """Attacks from one seed, each on a fresh copy of a trace as plain data."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._operators = sorted(torch._C._dispatch_get_all_op_names())

    def attacked(self, data: Any) -> Any:
        """A copy with one attack."""
        found = copy.deepcopy(data)
        attack = self._random.choice([self._operator, self._leaf, self._leaf, self._size, self._size])
        attack(found)
        return found

    def _operator(self, data: Any) -> None:
        """Call any operator of all that are registered in place of one."""
        calls = [node for node in data["graph"]["nodes"] if node[0] == "call_function"]
        name, _, overload = self._random.choice(self._operators).partition(".")
        self._random.choice(calls)[2] = ["op", name, overload or "default"]

    def _leaf(self, data: Any) -> None:
        """Pass a string to a part of the model, or have it run another method."""
        calls = list((data["leaves"] or {}).values())
        if not calls:
            return self._operator(data)
        call = self._random.choice(calls)
        text: Any = f"/tmp/{CANARY}"
        for _ in range(self._random.randint(0, 3)):
            text = [self._random.choice("lt"), text] if self._random.random() < 0.7 else ["d", text, 1]
        chance = self._random.random()
        if chance < 0.4 and call[5]:
            self._random.choice(call[5])[1] = text
        elif chance < 0.6:
            call[1] = call[1].replace("[]", f'[\\"{CANARY}/x\\"]', 1)
        elif chance < 0.8:
            call[1] = call[1].replace("null", json.dumps(json.dumps([f"{CANARY}/x"])), 1)
        else:
            call[0] = call[0].partition("..")[0] + self._random.choice(("..masked", "..hidden", "..requires_grad_"))
        return None

    def _size(self, data: Any) -> None:
        """Give a value any sizes."""
        values = data["graph"]["values"]
        values[self._random.randrange(len(values))] = ["T", "float32", self.size(), self.size()]

    def size(self, depth: int = 0) -> Any:
        """A size of sums, products, powers and functions, some deep, some wide."""
        chance = self._random.random()
        if depth > 6 or chance < 0.15:
            return self._random.choice([["y", self._random.choice(_SYMBOLS)], self._random.randint(-9, 99)])
        if chance < 0.4:
            width = self._random.choice((2, 3, 8, 30))
            symbols = [["y", self._random.choice(_SYMBOLS)] for _ in range(width)]
            return ["Add", *symbols, self.size(depth + 1)]
        if chance < 0.55:
            return ["Mul", self.size(depth + 1), self.size(depth + 1)]
        if chance < 0.65:
            return ["Pow", self.size(depth + 1), self._random.choice((2, 3, 4, 8))]
        if chance < 0.75:
            return ["ModularIndexing", *[self.size(depth + 1) for _ in range(3)]]
        name = self._random.choice(["Mod", "PythonMod", "FloorDiv", "Abs", "Max", "Eq", *sorted(EXPRESSIONS)])
        return [name, *[self.size(depth + 1) for _ in range(1 if name in ("Abs", "Not") else 2)]]
