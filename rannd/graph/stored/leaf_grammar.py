"""The grammar of calls of leaves in a cached trace: parts of the user's model that run as one operator.

They run the user's own code, which need not expect what a trace passes to it. It gets tensors and numbers; text only
as the words that `forward` of a module was called with, and as keys of containers.
"""

from __future__ import annotations

import re
from typing import Any, Final

from rannd.graph.modules.autograd_functions import function_name, is_function
from rannd.graph.stored.container_text import check_class_name, check_container
from rannd.graph.stored.grammar_rules import (
    MOST_DIMENSIONS,
    Rule,
    broken,
    dtype,
    each,
    natural,
    naturals,
    plain_list,
    record,
    text,
    truth,
)
from rannd.graph.stored.graph_grammar import MOST_PARTS, OF_MODULES, places
from rannd.graph.stored.size_grammar import Sizes

LONGEST_PATH: Final = 4_096
"""Characters of a path of modules."""
LONGEST_WORD: Final = 64
_WORD = re.compile(rf"\w{{0,{LONGEST_WORD}}}", re.ASCII)
_METHOD = re.compile(r"(?!__)[A-Za-z_]\w{0,511}", re.ASCII)


def leaf_call(sizes: Sizes) -> Rule:
    """The rule for a call of a leaf, whose sizes count with others."""

    def shape(value: Any) -> None:
        plain_list(value)
        if len(value) > MOST_DIMENSIONS:
            broken("the sizes of a tensor", value)
        for size in value:
            if size is not None:
                sizes.check(size)

    call = record(
        text, check_container, each(_source), each(_source), naturals, places,
        each(record(dtype, shape, truth)), check_container, naturals, places, truth,
    )  # fmt: skip

    def check(data: Any) -> None:
        call(data)
        path, spec, constants = data[0], data[1], data[5]
        forward = _is_forward(path)
        given = [value for _, value in constants]
        if any(type(value) is list and value[0] in ("l", "t", "d", "s") for value in given):
            broken(f"a container for {path}", constants)
        words = {value for value in given if type(value) is str}
        if words and not forward:
            broken(f"a string for {path}", constants)
        for word in (*words, *check_container(spec).keys):
            if not _WORD.fullmatch(word):
                broken(f"a string for {path}", word)

    return check


def _is_forward(path: str) -> bool:
    """Whether a path is that of a module, not of a method or Function; after checking it."""
    module, found, method = path.partition("..")
    if is_function(path):
        check_class_name(function_name(path))
    elif len(module) > LONGEST_PATH or module.count(".") >= MOST_PARTS:
        broken("a path", path)
    elif found and (method in OF_MODULES or not _METHOD.fullmatch(method)):
        broken("a method", method)
    return not found


def _source(value: Any) -> None:
    text(value) if type(value) is str else natural(value)
