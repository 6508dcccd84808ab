"""Every ``python`` block of README and docs runs, in a process of its own, with the names that its page takes as given.

A comment in the line before a block says otherwise: ``<!-- continues -->`` adds it to the block before it;
``<!-- fragment: REASON -->`` is for code that is no program, of which only the imports run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from job import FORK, ROOT, Job

BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

MODEL = """\
import torch
import pyrannc

Net = lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
loss_function = torch.nn.functional.mse_loss
dataset = torch.utils.data.TensorDataset(torch.randn(8, 8), torch.randn(8, 4))
loader = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(2)]
model = Net()
optimizer = torch.optim.AdamW(model.parameters())
"""
WRAPPED = MODEL + "model = pyrannc.RaNNCModule(model, optimizer)\n"
GIVEN = {
    "README.md": MODEL,
    "faq.md": WRAPPED
    + "(first, first_target), (second, second_target) = loader\n"
    + "scheduler, step = torch.optim.lr_scheduler.StepLR(optimizer, 1), 0\n",
    "integrations.md": MODEL,
    "profiling.md": MODEL + "x = loader[0][0]\n",
    "tracing.md": """\
import torch
import pyrannc
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
ids = torch.randint(0, 32, (2, 8))
""",
}
"""Names that the blocks of a page use and its text explains."""
NOTEBOOK = """\
def train(rows):
    model, x = pyrannc.RaNNCModule(Net()), torch.randn(rows, 8)
    model(x).sum().backward()
"""
TRACKERS = (
    WRAPPED
    + """\
model(loader[0][0]).sum().backward()
writer = lambda values, step: None
"""
)
ALSO_GIVEN = {"notebook_launcher": NOTEBOOK, "PlanMetrics": TRACKERS}
"""What blocks with a word need beside it."""


@dataclass(frozen=True)
class Snippet:
    """A program of a page, or a fragment, of which only the imports are looked at."""

    page: str
    number: int
    code: str
    fragment: bool

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"


def snippets(page: Path) -> list[Snippet]:
    """The blocks of a page. ValueError for a comment that is none of those above."""
    found: list[Snippet] = []
    for note, code in BLOCK.findall(page.read_text()):
        if note == "continues":
            before = found.pop()
            found.append(Snippet(page.name, before.number, before.code + code, before.fragment))
            continue
        if note and not re.fullmatch(r"fragment: .+", note):
            raise ValueError(f"{page.name}: what does <!-- {note} --> say of the block behind it?")
        found.append(Snippet(page.name, len(found) + 1, code, bool(note)))
    return found


SNIPPETS = [each for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) for each in snippets(page)]


@pytest.mark.ranks
@pytest.mark.parametrize("snippet", SNIPPETS, ids=str)
def test_snippets_run(job: Job, snippet: Snippet, tmp_path: Path) -> None:
    given = GIVEN.get(snippet.page, "") + "".join(more for word, more in ALSO_GIVEN.items() if word in snippet.code)
    code = given + snippet.code
    if snippet.fragment:
        code = "\n".join(re.findall(r"^(?:import|from) .*", snippet.code, re.MULTILINE))
    script = tmp_path / "snippet.py"
    script.write_text(code)
    job.run("python", FORK, str(script), folder=tmp_path, ACCELERATE_USE_CPU="true")


def test_blocks_are_found_with_their_notes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\na = 1\n```\n<!-- continues -->\n```python\nb = a\n```\n<!-- fragment: part -->\n```python\nc\n```\n"
    )
    assert [(each.code, each.fragment) for each in snippets(page)] == [("a = 1\nb = a\n", False), ("c\n", True)]
    page.write_text("<!-- runs on a full moon -->\n```python\na = 1\n```\n")
    with pytest.raises(ValueError, match="full moon"):
        snippets(page)
