"""The parity cases of every pair of factors; a file of their own, because a worker takes a file at a time.

Every fifth one takes part in `make test-long`, all in `make test-full`.
"""

from __future__ import annotations

import pytest
from parity.cases import COMPACT, SOME
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation
from parity.several import SEVERAL, SOME_OF_SEVERAL

pytestmark = pytest.mark.long
CASES = [case for case in (*COMPACT, *SEVERAL) if case not in SOME and case not in SOME_OF_SEVERAL]
RARE = [case for number, case in enumerate(CASES) if number % 5]
