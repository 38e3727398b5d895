"""Mutants of the session policy: the line that is wrong and the checks that catch it."""

from __future__ import annotations

from tests.testing.policies import Mutant

_PREPARED = (
    "        return Prepared(tensors, len(rows), Key(), meta=rows, session_ids=ids, seqs=seqs)\n"
)
_FRAMES = '        cache["frames"].add_(1.0)\n'
_ENCODE = (
    "        trail.copy_(torch.cat([trail[:, 1:], cache.inputs["
    '"state"][:, None]], dim=1))\n' + _FRAMES
)
_SPEC = (
    '            "trail": BufferSpec((KEPT, STATE), torch.float32, session=True),\n'
    '            "frames": BufferSpec((1,), torch.float32, session=True),\n'
)
_STATES = "        states = torch.stack([self._state(row.state) for row in rows])\n"
_APART = "l3_sessions_stay_apart"
_STATELESS = "l3_requests_without_a_session_keep_nothing"
_FAILED = "l3_failed_request_leaves_its_session"
_LOST = "l3_lost_sessions_are_told_and_start_afresh"
_GRAPHS = "l3_sessions_on_recorded_graphs_equal_eager"
_REPEATS = "l3_session_repeats_a_stored_result"
_REFUSES = "l3_session_refuses_a_wrong_seq"
ALL = (_REPEATS, _REFUSES, _APART, _STATELESS, _FAILED, _LOST, _GRAPHS)


def _all_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in ALL if name not in names)


MUTANTS: dict[str, Mutant] = {
    "session data on self": Mutant(
        "model",
        (
            (
                _ENCODE,
                '        kept = getattr(self, "kept", torch.zeros(KEPT, STATE))\n'
                '        self.kept = torch.cat([kept[1:], cache.inputs["state"][:1]])\n'
                "        trail.copy_(self.kept.expand_as(trail))\n"
                '        self.frames = getattr(self, "frames", 0) + 1\n'
                '        cache["frames"].fill_(self.frames)\n',
            ),
        ),
        _APART,
        "must not notice another session",
        also=(_STATELESS, _FAILED, _LOST, _GRAPHS),
    ),
    "session buffers that are none": Mutant(
        "model",
        ((_SPEC, _SPEC.replace("session=True", "zero=True")),),
        _REPEATS,
        "must succeed; got PluginContractError",
        also=_all_but(_REPEATS),
    ),
    "one buffer that is no session's": Mutant(
        "model",
        (("torch.float32, session=True),\n        }", "torch.float32),\n        }"),),
        _APART,
        "must not notice another session",
        also=(_STATELESS, _FAILED, _LOST, _GRAPHS),
    ),
    "sessions that prepare loses": Mutant(
        "model",
        ((_PREPARED, _PREPARED.replace(", session_ids=ids, seqs=seqs", "")),),
        _REFUSES,
        "must succeed; got PluginContractError",
        also=_all_but(_REFUSES),
    ),
    "frames counted in prepare": Mutant(
        "model",
        (
            (
                _STATES,
                '        self.count = getattr(self, "count", {})\n'
                "        for name in ids:\n"
                "            self.count[name] = self.count.get(name, 0) + 1 if name else 0\n"
                f"{_STATES}"
                "        states += 0.01 * torch.tensor([[self.count[name]] for name in ids])\n",
            ),
        ),
        _FAILED,
        "must leave its session as it was",
        also=(_LOST,),
    ),
    "frames counted while a request fails": Mutant(
        "model",
        (
            (
                _FRAMES,
                f"{_FRAMES}\n    def plan(self, cache: Cache, batch: Prepared) -> None:\n"
                '        self.turns = getattr(self, "turns", {})\n'
                "        for row, name in enumerate(batch.session_ids or ()):\n"
                "            if name is not None and batch.seqs[row]:\n"
                "                self.turns[name] = self.turns.get(name, 0) + 1\n"
                '                cache["frames"][row] = self.turns[name]\n'
                "            elif name is not None:\n"
                "                self.turns[name] = 0\n",
            ),
        ),
        _FAILED,
        "must leave its session as it was",
    ),
    "a new session that does not start afresh": Mutant(
        "model",
        (
            (
                _FRAMES,
                f"{_FRAMES}\n    def plan(self, cache: Cache, batch: Prepared) -> None:\n"
                '        self.seen = getattr(self, "seen", set())\n'
                "        for row, name in enumerate(batch.session_ids or ()):\n"
                "            if name in self.seen and batch.seqs[row] == 0:\n"
                '                cache["frames"][row] += 1.0\n'
                "            if name is not None and batch.seqs[row] == 1:\n"
                "                self.seen.add(name)\n",
            ),
        ),
        _LOST,
        "was evicted must start afresh",
    ),
    "a stateless request that starts somewhere": Mutant(
        "model",
        (
            (
                _FRAMES,
                f"{_FRAMES}\n    def plan(self, cache: Cache, batch: Prepared) -> None:\n"
                "        if batch.session_ids and batch.session_ids[0] is None:\n"
                '            cache["frames"].add_(getattr(self, "known", 0))\n'
                "        else:\n            self.known = 1\n",
            ),
        ),
        _STATELESS,
        "must not notice one",
    ),
    "a ring index in Python": Mutant(
        "model",
        (
            (
                _ENCODE,
                "        trail[:, self.index % KEPT] = cache.inputs['state']\n"
                f"{_FRAMES}\n    index = 0\n\n"
                "    def plan(self, cache: Cache, batch: Prepared) -> None:\n"
                "        self.index = (batch.seqs or (0,))[0] or 0\n",
            ),
        ),
        _GRAPHS,
        "must give the same on recorded graphs",
    ),
}
