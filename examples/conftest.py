"""Lets the tests of each example see that example as if it, and it alone, were installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.examples.installed import EXAMPLES, installed, sources

for _project in EXAMPLES:
    sys.path.append(str(sources(_project)))  # test modules import the package at collection


@pytest.fixture(scope="module", autouse=True)
def _installed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    project = next(p for p in EXAMPLES if request.path.is_relative_to(p))
    with installed(project, tmp_path_factory.mktemp("site")):
        yield
