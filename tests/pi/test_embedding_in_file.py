"""The token embedding may stay in the checkpoint's file: same results, no copy of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pi.tiny_engines import GOLDEN, model_request, open_engine


@pytest.mark.parametrize("model", ["pi0", "pi05"])
def test_results_are_the_same_and_the_table_is_a_view_of_the_file(model: str) -> None:
    file = GOLDEN / model / "model.safetensors"
    before = file.read_bytes()
    with open_engine(model) as copied, open_engine(model, embedding_in_file=True) as in_file:
        request = model_request(copied)
        assert torch.equal(in_file.step(request), copied.step(request))
        assert not _is_mapped(copied, str(file))
        assert _is_mapped(in_file, str(file))
        adapter: Any = in_file.adapter
        table = adapter.prefix.embed.weight
        other = {"paligemma_with_expert.paligemma.lm_head.weight": torch.zeros_like(table)}
        adapter.update_weights(other)
        changed = in_file.step(request)
        assert not torch.equal(changed, copied.step(request))
        copied.adapter.update_weights(other)
        assert torch.equal(changed, copied.step(request))
    assert file.read_bytes() == before


def _is_mapped(engine: Any, file: str) -> bool:
    """Return whether the embedding's memory belongs to a mapping of ``file``."""
    address = engine.adapter.prefix.embed.weight.data_ptr()
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            start, end = (int(x, 16) for x in line.split(maxsplit=1)[0].split("-"))
            if start <= address < end:
                return file in line
    return False
