"""The class an adapter author subclasses: one test method per check of the conformance kit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, ClassVar

import pytest

from phyai.manifest import AdapterManifest
from phyai.testing import tolerances
from phyai.testing.conformance import CHECKS, MAX_LEVEL
from phyai.testing.conformance.check import Check
from phyai.testing.conformance.report import Run
from phyai.testing.conformance.subject import Given, Subject

_FIXTURES = ("tiny_checkpoint", "sample_requests", "golden_dir", "reference")
"""What a fixture of the module or a conftest gives when the class itself says nothing."""

_GIVEN = (
    "manifest",
    "tiny_checkpoint",
    "sample_requests",
    "golden_dir",
    "reference",
    "preset",
    "tolerance",
    "batch_tolerance",
    "backends",
)


class AdapterConformance:
    """Tests ``test_l0_...`` to ``test_l3_...`` of one adapter plugin; see docs/conformance.md.

    Everything but ``manifest`` may be left out: the manifest's first preset then stands in. Each
    name is a plain attribute or a fixture, of the class or (but for names of settings) of its
    module; a fixture is asked once, so what it gives must outlive one test (a file in tmp_path
    does).

    manifest: plugin id or AdapterManifest.  tiny_checkpoint: folder, adapter arguments by name, or
    AdapterArgs.  sample_requests: list of requests.  golden_dir: folder of golden cases.
    reference: ``reference(request, noise)`` -> expected result.  level: highest level to test.

    >>> from phyai.testing import AdapterConformance
    >>> class TestMyPolicy(AdapterConformance):
    ...     manifest = "my_policy"
    ...     level = 1
    >>> [name for name in dir(TestMyPolicy) if name.startswith("test_l1_d")]
    ['test_l1_dropped_tensor_is_named']
    """

    manifest: Any = None
    tiny_checkpoint: Any = None
    sample_requests: Any = None
    golden_dir: Any = None
    reference: Any = None
    preset: Any = None
    level: ClassVar[int] = MAX_LEVEL
    _run: ClassVar[Run | None] = None
    tolerance: Any = tolerances.REFERENCE_ATOL
    batch_tolerance: Any = tolerances.BATCH_ATOL
    backends: Any = ("recorded", "cuda")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for check in CHECKS:
            name = f"test_{check.name}"
            if check.level > cls.level:
                setattr(cls, name, None)  # not collected
            elif getattr(cls, name) is None:  # its parent tests less
                setattr(cls, name, vars(AdapterConformance)[name])

    @pytest.fixture
    def conformance(self, request: pytest.FixtureRequest) -> Run:
        """Return the run all tests of the class share, engines and outcomes included."""
        # Of function scope, so that an author's fixtures may have any scope; kept by the class.
        cls = type(self)
        run: Run | None = vars(cls).get("_run")
        if run is None:
            run = cls._run = Run(Subject(Given(**_given(self, request))))
            node = request.node.getparent(pytest.Class)
            node.addfinalizer(lambda: _forget(cls))
        return run


def _given(test: AdapterConformance, request: pytest.FixtureRequest) -> dict[str, Any]:
    given = {name: _value(test, name, request) for name in _GIVEN}
    if not isinstance(given["manifest"], str | AdapterManifest):
        raise pytest.UsageError(
            f"{type(test).__name__}.manifest must be a plugin id or an AdapterManifest; got "
            f"{given['manifest']!r}."
        )
    return given


def _forget(cls: type[AdapterConformance]) -> None:
    run = cls._run
    cls._run = None
    if run is not None:
        run.subject.close()


def _value(test: object, name: str, request: pytest.FixtureRequest) -> Any:
    """Return an attribute of the class, or the value of the fixture of that name."""
    found = next((vars(c)[name] for c in type(test).__mro__ if name in vars(c)), None)
    if type(found).__name__ == "FixtureFunctionDefinition" or hasattr(
        found, "_pytestfixturefunction"
    ):
        return request.getfixturevalue(name)
    if found is None and name in _FIXTURES:
        try:
            return request.getfixturevalue(name)
        except pytest.FixtureLookupError as error:
            if error.argname != name:  # it is there, and what it asks for is not
                raise
    if isinstance(found, FunctionType) and len(inspect.signature(found).parameters) == 2:
        return found  # reference = some_function: not a method, it takes no self
    return getattr(test, name)


def _method(check: Check) -> Callable[[Any, Run, Any], None]:
    def test(self: AdapterConformance, conformance: Run, request: pytest.FixtureRequest) -> None:
        outcome = conformance.outcome(check)
        if outcome.status == "not-run":
            # A run of some tests (-k, a lower level) must not be green over what it left out.
            chosen = {i.name for i in request.session.items if i.parent is request.node.parent}
            hidden = [f for f in conformance.failed_needs(check) if f"test_{f.name}" not in chosen]
            outcome = hidden[0] if hidden else outcome
        if outcome.status == "failed":
            pytest.fail(f"{outcome.message}\n\n{outcome.traceback}".rstrip(), pytrace=False)
        if outcome.status != "passed":
            pytest.skip(outcome.message)

    test.__name__ = f"test_{check.name}"
    test.__qualname__ = f"AdapterConformance.{test.__name__}"
    test.__doc__ = check.run.__doc__
    return test


for _check in CHECKS:
    setattr(AdapterConformance, f"test_{_check.name}", _method(_check))
