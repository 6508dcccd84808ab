"""The line of the user's code that an operator of a graph comes from."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import rannd
from rannd.graph.modules.source_location import source_line

STACK = """  File "/home/me/train.py", line 9, in <module>
    main()
  File "/home/me/models/net.py", line 12, in forward
    return self.linear(x)
  File "{torch}/nn/modules/linear.py", line 134, in forward
    return F.linear(input, self.weight, self.bias)
  File "{rannd}/graph/tracing/export.py", line 1, in forward
    pass
"""


def test_it_is_the_innermost_line_outside_of_torch_and_rannd() -> None:
    folders = {"torch": Path(torch.__file__).parent, "rannd": Path(rannd.__file__).parent}
    assert source_line(STACK.format(**folders)) == "models/net.py:12"


def test_a_stack_without_user_code_has_none() -> None:
    assert source_line("") == ""
    assert source_line(f'  File "{Path(torch.__file__)}", line 3, in forward\n') == ""
    assert source_line('  File "<string>", line 3, in forward\n') == ""


def test_long_names_of_files_are_cut_at_their_begin() -> None:
    found = source_line(f'  File "/a/{"b" * 200}/c.py", line 3, in forward\n')
    assert found.endswith("b/c.py:3")
    assert len(found) == 102


def test_torch_writes_stacks_of_exported_graphs_so() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)  # this line

    root = torch.export.export(Net(), (torch.zeros(2, 4),)).module(check_guards=False)
    (node,) = (each for each in root.graph.nodes if each.op == "call_function" and "linear" in str(each.target))
    lines = Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if "# this line" in line and "self.linear(x)" in line)
    assert source_line(node.meta["stack_trace"]) == f"modules/test_source_location.py:{number}"
