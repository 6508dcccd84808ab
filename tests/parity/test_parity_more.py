"""The parity cases that `make test-long` adds to those of test_parity.py."""

from __future__ import annotations

import pytest
from parity.cases import DRAWN, SOME
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation
from parity.several import SOME_OF_SEVERAL

pytestmark = pytest.mark.long
CASES = [*SOME[1::3], *SOME[2::3], *DRAWN[1::2], *SOME_OF_SEVERAL[1::2]]
