"""Cosmos3 in replicas of several ranks that the engine starts: results, traffic and bytes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phyai.errors import RequestError
from phyai.models.cosmos3.network.flops import MediaTokens
from phyai.models.cosmos3.network.layout import MediaLayout
from phyai.models.cosmos3.traffic import (
    Exchange,
    decode_exchange,
    evaluation_exchange,
    guidance_exchange,
    rank_weights,
    text_exchange,
)
from phyai.models.cosmos3.vae.rank_tiling import RankTiling, grid_of
from phyai.types import Media, Prepared
from tests.cosmos.cosmos_engines import (
    GENERATION,
    POLICY,
    action_request,
    observation,
    prompt,
    video_request,
)
from tests.cosmos.rank_cases import golden_asks, joined_records, opened, with_key_heads
from tests.rank_probe import installed
from tests.rank_runs import Ask, Mesh, Run, golden_errors, probing, run_all

pytestmark = pytest.mark.slow
MESHES = (Mesh(tp=2), Mesh(tp=4), Mesh(tp=2, cfg=2))
FORWARD, LOOP = 2e-5, 1e-4
FLOAT = 4
FIRST, AGAIN = "first prompt", "other prompt"
LARGE = "large frames"
SIDE = 512


def asks_of(plugin: str) -> list[Ask]:
    """Return every golden request, then pairs of prompts, batches, and what must be refused."""
    ask = observation if plugin == POLICY else prompt
    rows = action_request if plugin == POLICY else video_request
    found = [
        *golden_asks(plugin),
        Ask(FIRST, ask(0), record=False),
        Ask(AGAIN, replace(ask(0), prompt="stack the blocks"), record=False),
        Ask("two rows", rows(rows=2)),
    ]
    if plugin == POLICY:
        return [
            *found,
            Ask("wrong domain", action_request(domain_id=99)),
            Ask("wrong token", action_request(text_ids=torch.tensor([[1, 4000]]))),
            Ask("after them", ask(0), record=False),
        ]
    large = {"height": SIDE, "width": SIDE, "num_steps": 1, "num_frames": 5}
    return [
        *found,
        Ask(LARGE, prompt(**large)),
        Ask("bad size", prompt(height=40)),
        Ask("after it", ask(0), record=False),
    ]


REFUSED = {
    "wrong domain": (RequestError, r"domain.*\[0, 12\).*got \[?99"),
    "wrong token": (RequestError, r"vocabulary of 272; got 4000"),
    "bad size": (RequestError, r"height must be a multiple of 16 pixels; got 40"),
}


@dataclass
class Plugin:
    """One process's results, and what the requests become."""

    name: str
    asks: list[Ask]
    alone: Run
    adapter: Any
    prepared: dict[str, Prepared]

    @property
    def config(self) -> Any:
        return self.adapter.network_config


@pytest.fixture(scope="module", autouse=True)
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with installed(tmp_path_factory.mktemp("probe") / "site"):
        yield


@pytest.fixture(scope="module", params=[POLICY, GENERATION])
def plugin(
    request: pytest.FixtureRequest, probe: None, tmp_path_factory: pytest.TempPathFactory
) -> Plugin:
    name: str = request.param
    return alone(name, asks_of(name), tmp_path_factory.mktemp(name))


def alone(name: str, asks: list[Ask], folder: Path, **changes: Any) -> Plugin:
    with probing(folder), opened(name, Mesh(), **changes) as engine:
        adapter = engine.adapter
        done = run_all(engine, Mesh(), asks, folder)
        prepared = {
            ask.name: adapter.prepare(ask.request) for ask in asks if ask.name not in REFUSED
        }
    return Plugin(name, asks, done, adapter, prepared)


def shared(plugin: Plugin, mesh: Mesh, folder: Path, **changes: Any) -> Run:
    with probing(folder), opened(plugin.name, mesh, **changes) as engine:
        assert engine.mode == "local"
        assert len(set(engine.stats()["replicas"][0]["rank_pids"])) == mesh.world
        return run_all(engine, mesh, plugin.asks, folder)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_replica_of_several_ranks(plugin: Plugin, mesh: Mesh, tmp_path: Path) -> None:
    """All checks of one replica in one test: each starts as many processes as it has ranks."""
    run = shared(plugin, mesh, tmp_path)
    check_golden(plugin, run)
    check_answers(plugin, run)
    check_refused(plugin, run)
    check_traffic(plugin, run)
    check_remembered(plugin, run)
    check_share(plugin, run)


# ---------------------------------------------------------------- results


def check_golden(plugin: Plugin, run: Run) -> None:
    """Every tensor of every case, also those inside of which a rank has only its heads."""
    last, kv_heads = plugin.config.num_hidden_layers - 1, plugin.config.num_key_value_heads
    cases = [ask for ask in plugin.asks if ask.golden is not None]
    assert len(cases) >= 8
    for ask in cases:
        seen = run.seen.get(ask.name)
        records = {} if seen is None else joined_records(seen, run.mesh, kv_heads)
        wrong = golden_errors(ask, plugin.adapter, run.answers[ask.name], records)
        # Nothing depends on the last text layer's output: only engines that record all have it.
        wrong = [c for c in wrong if not c.name.startswith(f"mid.und.{last}.out")]
        assert not wrong, f"{ask.name}: {wrong}"


def check_answers(plugin: Plugin, run: Run) -> None:
    """Compare with one process, and the ranks with each other."""
    kv_heads = plugin.config.num_key_value_heads
    forwards = 0
    for ask in plugin.asks:
        if ask.name in REFUSED or not ask.record:
            continue
        mine = joined_records(run.seen[ask.name], run.mesh, kv_heads)
        one = plugin.alone.seen[ask.name][0].records
        for name in one:
            if name.startswith("result."):
                assert apart(mine[name], one[name]) < LOOP, f"{ask.name}: {name}"
                for rank in run.seen[ask.name]:  # the solver variable is alike on all ranks
                    assert all(map(torch.equal, rank.records[name], mine[name]))
            elif name.startswith("steps.") and plugin.prepared[ask.name].key.num_steps == 1:
                assert apart(mine[name], one[name]) < FORWARD, f"{ask.name}: {name}"
                forwards += 1
    assert forwards >= 2
    for ask in plugin.asks:
        if ask.name != LARGE and ask.name not in REFUSED:  # its frames are blended, others not
            check_alike(ask.name, run.answers[ask.name], plugin.alone.answers[ask.name])


def apart(mine: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    assert len(mine) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(mine, other, strict=True))


def check_alike(name: str, mine: Any, other: Any) -> None:
    """Compare what users get: chunks, media, tensors or mappings of them."""
    assert type(mine) is type(other), f"{name}: {mine!r}"
    if isinstance(mine, Media):
        assert mine.data.shape == other.data.shape
        assert np.abs(mine.data.astype(int) - other.data.astype(int)).max() <= 1, name
    elif isinstance(mine, torch.Tensor):
        torch.testing.assert_close(mine, other, rtol=0, atol=LOOP)
    elif isinstance(mine, dict):
        for key in mine.keys() - {"sound"}:  # a decoder's gain; its golden case has a limit for it
            check_alike(f"{name}: {key}", mine[key], other[key])
    elif hasattr(mine, "actions"):
        np.testing.assert_allclose(mine.actions, other.actions, rtol=0, atol=LOOP, err_msg=name)
    else:
        assert mine == other, name


def check_refused(plugin: Plugin, run: Run) -> None:
    """What one process refuses is refused with the same words, and harms nothing."""
    names = [ask.name for ask in plugin.asks if ask.name in REFUSED]
    assert names
    for name in names:
        kind, text = REFUSED[name]
        for answer in (run.answers[name], plugin.alone.answers[name]):
            assert isinstance(answer, kind), repr(answer)
            assert re.search(text, str(answer)), answer
    last, first = run.answers[plugin.asks[-1].name], run.answers[FIRST]
    if isinstance(last, Media):
        assert np.array_equal(last.data, first.data)
    else:
        assert np.array_equal(last.actions, first.actions)


# ---------------------------------------------------------------- what is counted


def check_traffic(plugin: Plugin, run: Run) -> None:
    """Compare each rank's counts of each request, part by part, with docs/parallel.md.

    Which texts are new is followed here: every rank computes those of its branches once.
    """
    config, mesh = plugin.config, run.mesh
    known: list[set[tuple[int, ...]]] = [set() for _ in range(mesh.world)]
    for ask in plugin.asks:
        if ask.name in REFUSED:
            continue
        prepared = plugin.prepared[ask.name]
        layout = MediaLayout.of(prepared.key, config)
        media, rows = MediaTokens(**layout.leaves), prepared.rows
        noise = [t for name, t in prepared.tensors.items() if name.startswith("noise.")]
        values = sum(tensor[0].numel() for tensor in noise)
        guided = len(prepared.key.branches) == 2
        for rank, seen in enumerate(run.seen[ask.name]):
            own = branches_of(prepared, mesh, rank)
            texts, tokens, encode = 0, 0, Exchange()
            for branch in own:
                new = prompts(prepared, branch) - known[rank]
                known[rank] |= new
                texts, tokens = texts + len(new), tokens + sum(map(len, new))
                for text in new:
                    encode += text_exchange(config, len(text), FLOAT)
            assert counted(seen.encode, "tp") == only(encode, mesh.tp), ask.name
            assert counted(seen.encode, "cfg") == Exchange()
            assert seen.encode.get("und_rows", 0) == texts
            assert seen.encode.get("und_tokens", 0) == tokens
            assert len(seen.steps) == prepared.key.num_steps
            step = len(own) * evaluation_exchange(config, media, rows, FLOAT)
            across = guidance_exchange(values, rows) if guided else Exchange()
            for found in seen.steps:
                assert counted(found, "tp") == only(step, mesh.tp), ask.name
                assert counted(found, "cfg") == only(across, mesh.cfg), ask.name
                assert found["gen_tokens"] == len(own) * rows * media.total
                assert {b: found.get(f"evaluations.{b}", 0) for b in ("cond", "uncond")} == {
                    b: int(b in own) for b in ("cond", "uncond")
                }
                assert "und_rows" not in found  # no text is computed in a step
                if mesh.tp > 1:
                    assert counted(found, "tp").payload_bytes > 0
                if mesh.cfg > 1 and guided:
                    assert counted(found, "cfg").payload_bytes > 0
            tp, cfg = output_exchange(ask, mesh)
            assert (counted(seen.output, "tp"), counted(seen.output, "cfg")) == (tp, cfg)
            for part in (seen.encode, *seen.steps, seen.output):
                assert counted(part, "world") == Exchange()


def branches_of(prepared: Prepared, mesh: Mesh, rank: int) -> tuple[str, ...]:
    """Return what a rank evaluates: of two branches and two cfg ranks, one each."""
    branches = prepared.key.branches
    return (branches[rank // mesh.tp],) if mesh.cfg == 2 == len(branches) else branches


def prompts(prepared: Prepared, branch: str) -> set[tuple[int, ...]]:
    own = prepared.for_branch(branch).tensors
    pairs = zip(own["tokens"].tolist(), own["token_len"].tolist(), strict=True)
    return {tuple(row[:length]) for row, length in pairs}


def counted(found: dict[str, int], axis: str) -> Exchange:
    return Exchange(found.get(f"{axis}.collectives", 0), found.get(f"{axis}.bytes", 0))


def only(exchange: Exchange, ranks: int) -> Exchange:
    """Return it where there are several ranks along its axis; else nothing is exchanged."""
    return exchange if ranks > 1 else Exchange()


def output_exchange(ask: Ask, mesh: Mesh) -> tuple[Exchange, Exchange]:
    if ask.name != LARGE:
        return Exchange(), Exchange()
    side = SIDE // 16
    spans = RankTiling(grid=grid_of(mesh.world, side, side)).spans(side, side)
    height, width = (16 * max(span.stop - span.start for span in along) for along in spans)
    tp, cfg = decode_exchange(2, (height, width), FLOAT, mesh.tp)
    return only(tp, mesh.tp), only(cfg, mesh.cfg)


def check_remembered(plugin: Plugin, run: Run) -> None:
    """The second request has another prompt and the same, empty one beside it."""
    for rank, seen in enumerate(run.seen[AGAIN]):
        evaluates = branches_of(plugin.prepared[AGAIN], run.mesh, rank)
        assert seen.encode.get("und_rows", 0) == int("cond" in evaluates)
    for rank, seen in enumerate(run.seen[plugin.asks[-1].name]):
        assert "und_rows" not in seen.encode, rank
        assert counted(seen.encode, "tp") == Exchange()


def check_share(plugin: Plugin, run: Run) -> None:
    heads = {"action": plugin.name == POLICY, "sound": plugin.name == GENERATION}
    whole = rank_weights(plugin.config, 1, **heads)
    (one,) = plugin.alone.loads
    assert one == {"split": FLOAT * whole.split, "whole": FLOAT * whole.whole, "read": sum_of(one)}
    copies = max(run.mesh.tp // plugin.config.num_key_value_heads, 1)
    layers, width = plugin.config.num_hidden_layers, plugin.config.hidden_size
    keys = 2 * layers * 2 * width * plugin.config.kv_size * FLOAT
    doubled = keys * (copies - 1) // run.mesh.tp  # what another rank has, too
    for rank, load in enumerate(run.loads):
        share = rank_weights(plugin.config, run.mesh.tp, rank=rank % run.mesh.tp, **heads)
        assert load["split"] == FLOAT * share.split <= one["split"] // run.mesh.tp + doubled
        assert load["whole"] == one["whole"]
        assert load["read"] == sum_of(load)  # so no more than 1.1 times what it holds


def sum_of(load: dict[str, int]) -> int:
    return load["split"] + load["whole"]


def test_key_heads_that_are_fewer_than_the_ranks_are_kept_twice(tmp_path: Path) -> None:
    folder = with_key_heads(tmp_path / "two_key_heads", 2)
    requests = (
        ("forward", action_request(num_inference_steps=1, guidance_scale=1.0, neg_text_ids=None)),
        ("guided forward", action_request(num_inference_steps=1)),
        ("loop", action_request(rows=2, num_inference_steps=4)),
    )
    asks, changes = [Ask(*one) for one in requests], {"checkpoint_dir": str(folder)}
    (tmp_path / "one").mkdir()
    plugin = alone(POLICY, asks, tmp_path / "one", **changes)
    assert plugin.config.num_key_value_heads == 2
    run = shared(plugin, Mesh(tp=4), tmp_path / "four", **changes)
    check_answers(plugin, run)
    check_traffic(plugin, run)
    check_share(plugin, run)
