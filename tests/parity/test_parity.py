"""The parity cases of `make test`, see `parity.check`; test_parity_more.py has the others."""

from __future__ import annotations

from parity.cases import DRAWN, SOME
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation
from parity.several import SOME_OF_SEVERAL

CASES = [*SOME[::8], *DRAWN[::9], *SOME_OF_SEVERAL[::6]]
