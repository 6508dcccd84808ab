"""The parity cases of every run, see `parity.check`."""

from __future__ import annotations

from parity.cases import COMPACT, DRAWN
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation
from parity.several import SEVERAL

CASES = [*COMPACT, *DRAWN, *SEVERAL]
