"""Settings of the pi tests: plain asserts of the shared checkers show their values."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.pi.golden_preprocess")
