"""The line that a failure table shows of a rank."""

from __future__ import annotations

import pytest

from rannd.runner.last_words import last_words

SCRIPT = """Traceback (most recent call last):
  File "/home/me/train.py", line 33, in <module>
    main()
    ^^^^^^
  File "/home/me/loss.py", line 7, in main
    x["b"]
    ~^^^^^
KeyError: 'my data has no such key'
"""
INSIDE = """Traceback (most recent call last):
  File "/home/me/train.py", line 12, in <module>
    model(x)
  File "/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1789, in _call_impl
    return forward_call(*args, **kwargs)
RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 8x8)
"""


KEY = "KeyError: 'my data has no such key' (loss.py:7)"
SHAPES = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x3 and 8x8) (train.py:12)"
OTHER = "\nDuring handling of the above exception, another exception occurred:\n\n"
SYNTAX = '  File "/home/me/train.py", line 3\n    x = = 3\n        ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        ("", "-"),
        ("\n\n", "-"),
        ("one\nthe last words\n\n", "the last words"),
        (SCRIPT, KEY),
        (INSIDE, SHAPES),
        (SCRIPT + "rannd: this was rank 1, the script, after step 2\n", KEY),
        ("".join(f"[rank1]: {line}\n" for line in SCRIPT.splitlines()), KEY),
        (SCRIPT + OTHER + INSIDE, SHAPES),
        (SCRIPT.replace("key'", "key:\n  it has a, b'"), "KeyError: 'my data has no such key: (loss.py:7)"),
        (SCRIPT + "warning: something at exit\n", KEY),
        ("Traceback (most recent call last):\nValueError: x\n", "ValueError: x"),
        (SCRIPT.splitlines()[-1], "KeyError: 'my data has no such key'"),
        (SYNTAX, "SyntaxError: invalid syntax (train.py:3)"),
        (
            "Traceback (most recent call last):\n"
            + SCRIPT.split("\n", 1)[1].split('  File "/home/me/loss')[0]
            + SYNTAX,
            "SyntaxError: invalid syntax (train.py:3)",
        ),
        ("rannd: only a note\n", "-"),
    ],
)
def test_last_words(tail: str, words: str) -> None:
    assert last_words(tail) == words
