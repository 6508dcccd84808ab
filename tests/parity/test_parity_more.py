"""The parity cases that `make test-long` adds to those of test_parity.py."""

from __future__ import annotations

import pytest
from parity.cases import DRAWN, SOME
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation
from parity.several import SOME_OF_SEVERAL

pytestmark = pytest.mark.long
CASES = [
    case for cases, every in ((SOME, 8), (DRAWN, 9), (SOME_OF_SEVERAL, 6)) for n, case in enumerate(cases) if n % every
]
