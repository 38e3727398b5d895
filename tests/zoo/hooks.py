"""Hook plugins that go wrong around a correct policy: each with when, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

When = Literal["load", "start", "request", "never"]


@dataclass(frozen=True)
class Wild:
    """when: what must fail.  words: of its error.  check: of the kit, which must fail with it."""

    code: str
    when: When
    words: str
    kind: str = "PluginError"
    check: str = "l1_loads"


DUE = """
from dataclasses import replace
from phyai.hooks import hookimpl

class Around:
    def __init__(self, inner):
        self.inner = inner
    def __getattr__(self, name):
        return getattr(self.inner, name)
    def __call__(self, *more):
        return self.inner(*more)

"""


def raising(hook: str) -> str:
    return f"{DUE}@hookimpl\ndef {hook}():\n    raise LookupError('own words of {hook}')\n"


def wrapping(hook: str, body: str, stage: str = "") -> str:
    """Return a plugin whose wrapper of a part has ``body`` as class body."""
    wrapped = f"Wild(inner) if stage == {stage!r} else inner" if stage else "Wild(inner)"
    return (
        f"{DUE}class Wild(Around):\n{body}\n\n@hookimpl(wrapper=True)\n"
        f"def {hook}({'stage' if stage else ''}):\n    inner = yield\n    return {wrapped}\n"
    )


def part(hook: str) -> Wild:
    words = f"failed in {hook}: LookupError: own words of {hook}"
    return Wild(raising(hook), "start", words)


_CALL = "    def __call__(self, x, step, cache):\n        out = self.inner(x, step, cache)\n"
_RUN = "l2_requests_succeed"

WILD: dict[str, Wild] = {
    # ------------------------------------------------------------ cannot be loaded
    "h_import": Wild("import nothing_of_this_name\n", "load", "ModuleNotFoundError"),
    "h_exit": Wild("raise SystemExit('bye')\n", "load", "(import-error): SystemExit: bye"),
    "h_argument": Wild(
        f"{DUE}@hookimpl\ndef phyai_validate_action(chnk): pass\n",
        "load",
        "has no argument 'chnk'. Did you mean 'chunk'?",
    ),
    "h_misspelt": Wild(
        f"{DUE}@hookimpl\ndef phyai_sovler(adapter): pass\n",
        "load",
        "Hook 'phyai_sovler' of plugin 'h_misspelt' does not exist. Did you mean 'phyai_solver'?",
    ),
    "h_unmarked": Wild(
        "def phyai_validate_action(chunk): return 'no'\n", "load", "is not marked as a hook"
    ),
    "h_nothing": Wild("LIMIT = 3\n", "load", "must implement a hook"),
    "h_adapter": Wild(
        f"{DUE}@hookimpl\ndef phyai_adapter(): pass\n", "load", "never called in group phyai.hooks"
    ),
    # ------------------------------------------------------------ an exception in each hook
    "h_conditioning": part("phyai_conditioning"),
    "h_cache": part("phyai_cache"),
    "h_solver": part("phyai_solver"),
    "h_rollout": part("phyai_rollout_solver"),
    "h_output": part("phyai_output"),
    "h_denoiser": part("phyai_denoiser"),
    "h_kernels": part("phyai_kernels"),
    "h_validator": Wild(
        raising("phyai_validate_action"),
        "request",
        "validator 'h_validator' raised LookupError",
        "ActionRejected",
        _RUN,
    ),
    "h_ready": Wild(raising("phyai_engine_ready"), "never", "h_ready"),
    "h_started": Wild(raising("phyai_request_started"), "never", "h_started"),
    "h_finished": Wild(raising("phyai_request_finished"), "never", "h_finished"),
    "h_closing": Wild(raising("phyai_engine_closing"), "never", "h_closing"),
    # ------------------------------------------------------------ parts that are wrong
    "h_two_yields": Wild(
        f"{DUE}@hookimpl(wrapper=True)\ndef phyai_solver():\n    yield\n    yield\n",
        "start",
        "must yield exactly once; it yielded again",
        "PluginContractError",
    ),
    "h_forgets": Wild(
        f"{DUE}@hookimpl(wrapper=True)\ndef phyai_output():\n    inner = yield\n",
        "start",
        "must return the part; got None",
        "PluginContractError",
    ),
    "h_no_part": Wild(
        f"{DUE}@hookimpl\ndef phyai_solver():\n    return 7\n",
        "start",
        "must return a solver part; got int without accepts, grid, solve",
        "PluginContractError",
    ),
    "h_prediction": Wild(
        wrapping("phyai_denoiser", "    prediction = 'noise'", "prediction"),
        "start",
        "predicts 'noise'",
        "PluginContractError",
    ),
    "h_rows": Wild(
        f"{DUE}@hookimpl\ndef phyai_kernels():\n    return ['fast']\n",
        "start",
        "must return KernelRows; got str",
        "PluginContractError",
    ),
    # ------------------------------------------------------------ results that are wrong
    "h_crash": Wild(
        wrapping("phyai_denoiser", f"{_CALL}        return out['actoin']", "network"),
        "request",
        "Raised by code of hook plugin 'h_crash'.",
        "KeyError",
        _RUN,
    ),
    "h_nan": Wild(
        wrapping(
            "phyai_denoiser",
            f"{_CALL}        return {{k: v * float('nan') for k, v in out.items()}}",
            "network",
        ),
        "request",
        "result 'action' must be finite; got NaN or infinity",
        "ActionRejected",
        _RUN,
    ),
    "h_infinite": Wild(
        wrapping(
            "phyai_output",
            "    def decode(self, *more):\n        return [replace(c, actions=c.actions + "
            "float('inf')) for c in self.inner.decode(*more)]",
        ),
        "request",
        "actions must be finite in robot units",
        "ActionRejected",
        _RUN,
    ),
    "h_loses_rows": Wild(
        wrapping(
            "phyai_output",
            "    def decode(self, *more):\n        return self.inner.decode(*more)[1:]",
        ),
        "request",
        "must return one result per row",
        "PluginContractError",
        _RUN,
    ),
    "h_mutates": Wild(
        f"{DUE}@hookimpl\ndef phyai_validate_action(chunk):\n    chunk.actions.clip(-0.1, 0.1, "
        "out=chunk.actions)\n",
        "request",
        "validator 'h_mutates' raised ValueError: output array is read-only",
        "ActionRejected",
        _RUN,
    ),
}  # fmt: skip
