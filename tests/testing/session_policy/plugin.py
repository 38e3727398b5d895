"""Entry point of plugin ``toy_session``; imports no torch."""

from __future__ import annotations

from phyai.hooks import AdapterManifest, hookimpl


@hookimpl
def phyai_adapter() -> AdapterManifest:
    return AdapterManifest(
        id="toy_session",
        summary="a small tracker: the mean of the last four states of a session",
        target="session_policy.model:SessionPolicy",
        args="session_policy.model:SessionArgs",
        capabilities={
            "kind": "tracker",
            "action_dim": 3,
            "horizon": 2,
            "options": ["session_id", "seq"],
            "sessions": True,
        },
    )
