"""Golden cases of prompts: official strings and token ids against ours, record by record.

A file is a JSON list of records; its kind is told by their keys. A key that no rule knows is
infinitely wrong.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phyai.errors import CheckpointError
from phyai.golden import Comparison, unknown
from phyai.models.pi.golden.case import beside
from phyai.models.pi.processing.prompts import newline_prompt, prompt_parts, state_prompt
from phyai.models.pi.processing.tokenizer import (
    TOKENIZER_FILES,
    PromptTokenizer,
    find_tokenizer_file,
)

INPUTS = ("prompt", "state_f32")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Prompts:
    """One file of prompts: its kind and records."""

    path: Path
    root: Path
    kind: str
    records: tuple[Record, ...]

    def compare(self) -> list[Comparison]:
        """Return one comparison per key: the share of records and tokenizer files that differ."""
        folder = beside(self.path, self.root, "tokenizer")
        rule, files = _RULES[self.kind], _tokenizer_files(folder, self.kind)
        totals: Counter[str] = Counter()
        wrong: defaultdict[str, list[str]] = defaultdict(list)
        strange: set[str] = set()
        for file in files:
            tokenizer = PromptTokenizer.from_path(file)
            for index, record in enumerate(self.records):
                for key in [key for key in record if key not in INPUTS]:
                    mine = rule(record, key, tokenizer)
                    totals[key] += 1
                    if mine is None:
                        strange.add(key)
                    elif mine != record[key] or type(mine) is not type(record[key]):
                        wrong[key].append(f"record {index}, {file.name}")
        return [
            unknown(key)
            if key in strange
            else Comparison(
                f"{key} ({wrong[key][0]})" if wrong[key] else key,
                len(wrong[key]) / total,
                0.0,
                "exact",
            )
            for key, total in totals.items()
        ]


def read_prompts(path: Path, root: Path) -> Prompts:
    """Return a file of prompts; CheckpointError when it cannot be read or has no known kind."""
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"golden case {path.name} must be a readable JSON file; got {error}. "
            "Copy the golden set again."
        ) from error
    records = [records] if isinstance(records, dict) else records
    if not isinstance(records, list) or not all(
        isinstance(record, dict) and isinstance(record.get("prompt"), str) for record in records
    ):
        raise CheckpointError(
            f"golden case {path.name} must be a list of records with a 'prompt'; got "
            f"{str(records)[:80]}. Remove it from the set."
        )
    keys = {key for record in records for key in record}
    kinds = [kind for kind, sign in _SIGNS.items() if any(sign.match(key) for key in keys)]
    if len(kinds) != 1:
        raise CheckpointError(
            f"golden case {path.name} must be of one known kind ({', '.join(_SIGNS)}); fits "
            f"{', '.join(kinds) or 'none'} with keys {', '.join(sorted(keys)) or 'none'}. "
            "Remove it from the set."
        )
    return Prompts(path, root, kinds[0], tuple(records))


def _tokenizer_files(folder: Path, kind: str) -> list[Path]:
    """Return the files to check with: every readable one for openpi, the first one for LeRobot."""
    first = find_tokenizer_file(folder)
    if kind == "lerobot" or first is None:
        return [first or folder]  # a folder without a file raises when it is loaded
    optional = importlib.util.find_spec("sentencepiece") is not None
    files = [folder / name for name in TOKENIZER_FILES]
    return [f for f in files if f.is_file() and (f == first or optional or f.suffix == ".json")]


# ---------------------------------------------------------------- LeRobot


def _lerobot(record: Record, key: str, tokenizer: PromptTokenizer) -> Any:
    """Return our value of a key; None when the key is unknown."""
    model = "pi05" if "pi05_string" in record else "pi0"
    mine, openpi = _parts(record, "lerobot", model), _parts(record, "openpi", model)
    if key == "pi0_string":
        return newline_prompt(record["prompt"])
    if key == "pi05_string":
        return "".join(mine)
    if key == "equals_openpi":
        return "".join(mine) == "".join(openpi)
    match = re.fullmatch(r"(pi05_string_state_padded_to|hf_tokens|hf_equals_openpi)_(\d+)", key)
    if not match:
        return None
    what, length = match[1], int(match[2])
    if what == "pi05_string_state_padded_to":
        return state_prompt(record["prompt"], _state(record), state_prompt_dim=length)
    ids = _tokens(tokenizer, mine, length)[0]
    return ids if what == "hf_tokens" else ids == _tokens(tokenizer, openpi, length)[0]


# ---------------------------------------------------------------- openpi


def _openpi(record: Record, key: str, tokenizer: PromptTokenizer) -> Any:
    """Return our value of a key; None when the key is unknown."""
    if key == "pi0_encode_calls":
        return list(_parts(record, "openpi", "pi0"))
    if key == "pi05_string":
        return "".join(_parts(record, "openpi", "pi05"))
    match = re.fullmatch(r"(pi05|pi0)_(tokens|mask_sum)_(\d+)", key)
    if not match:
        return None
    ids, count = _tokens(tokenizer, _parts(record, "openpi", match[1]), int(match[3]))
    return ids if match[2] == "tokens" else count


def _tokens(
    tokenizer: PromptTokenizer, parts: tuple[str, ...], length: int
) -> tuple[list[int], int]:
    ids, count = tokenizer.encode(parts, length, overlong="truncate")
    return ids.tolist(), count


def _parts(record: Record, family: str, model: str) -> tuple[str, ...]:
    """Return the strings that a family encodes for a model; the state is in pi0.5's prompt."""
    return prompt_parts(
        record["prompt"],
        family=family,
        model=model,
        state_in_prompt=model == "pi05",
        state=_state(record) if model == "pi05" else None,
    )


def _state(record: Record) -> Any:
    if "state_f32" not in record:
        raise CheckpointError(
            f"golden record {str(record['prompt'])[:40]!r} must hold 'state_f32' for a prompt "
            f"with the state; got {', '.join(record)}. Copy the golden set again."
        )
    return np.asarray(record["state_f32"], np.float32)


_SIGNS = {
    "lerobot": re.compile(r"hf_tokens_\d+$"),
    "openpi": re.compile(r"pi05?_tokens_\d+$"),
}
_RULES: dict[str, Callable[[Record, str, PromptTokenizer], Any]] = {
    "lerobot": _lerobot,
    "openpi": _openpi,
}
