"""The complete parity matrix, its cases of four ranks; a file each, because a worker takes a file at a time."""

from __future__ import annotations

import pytest
from parity.cases import DRAWN, FULL
from parity.check import test_training_equals_the_emulation as test_training_equals_the_emulation

pytestmark = pytest.mark.full
CASES = [case for case in FULL if case.ranks == 4 and case not in DRAWN]
