"""How many tokens of which kind a cache has, and which text each of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from phyai.errors import PluginContractError, RequestError
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.types import Key, Prepared

Prompt = tuple[int, ...]
EVEN = "even"
"""Name in ``Key.extra`` of the branches whose rows all have as many text tokens as the bucket."""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """Tokens of one row: n of text, then per leaf those of video, action and sound.

    text: the text bucket.  frames, height, width: of the video latent.  patch: side of a patch.

    >>> from phyai.types import Key
    >>> sizes = (("tokens", 23), ("frames", 9), ("height", 33), ("width", 40), ("actions", 33))
    >>> layout = MediaLayout.of(Key(buckets=sizes), Cosmos3Config())
    >>> layout.grid, layout.leaves, layout.tokens
    ((9, 17, 20), {'video': 3060, 'action': 33}, 3093)
    """

    text: int
    frames: int
    height: int
    width: int
    actions: int
    sound: int
    patch: int

    @classmethod
    def of(cls, key: Key, config: Cosmos3Config) -> MediaLayout:
        """Return the layout of a key's cache; the buckets of actions and sound may be absent."""
        sizes = dict(key.buckets)
        return cls(
            text=key.bucket("tokens"),
            frames=key.bucket("frames"),
            height=key.bucket("height"),
            width=key.bucket("width"),
            actions=sizes.get("actions", 0),
            sound=sizes.get("sound", 0),
            patch=config.latent_patch_size,
        )

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns of patches; an incomplete patch counts."""
        return self.frames, ceil(self.height / self.patch), ceil(self.width / self.patch)

    @property
    def leaves(self) -> dict[str, int]:
        """Media tokens per leaf, in the order in which they stand."""
        frames, rows, columns = self.grid
        counts = {"video": frames * rows * columns, "action": self.actions, "sound": self.sound}
        return {leaf: count for leaf, count in counts.items() if count}

    @property
    def tokens(self) -> int:
        """Media tokens of one row."""
        return sum(self.leaves.values())

    @property
    def keys(self) -> int:
        """Text and media tokens of one row."""
        return self.text + self.tokens


@dataclass(frozen=True, slots=True)
class TextPlan:
    """The distinct texts of a batch, and which of them each row of the cache has.

    uniform: every row's text fills the bucket, so no key has to be masked.
    """

    prompts: tuple[Prompt, ...]
    prompt_of: tuple[int, ...]
    uniform: bool

    @property
    def lens(self) -> tuple[int, ...]:
        """Text tokens of each row."""
        return tuple(len(self.prompts[number]) for number in self.prompt_of)


def plan_text(
    batch: Prepared, branch: str, capacity: int, vocab: int, *, even: bool | None
) -> TextPlan:
    """Return the plan of one branch's cache from what the branch has of the batch; host side.

    even: whether all rows fill the bucket, decided by the key; None = by this batch. A captured
    graph has no other choice than the key's.
    Raises: RequestError for a token outside the vocabulary; PluginContractError for lengths outside
        the bucket, or shorter than the key says.
    """
    tokens, lens = batch.tensors["tokens"], batch.tensors["token_len"]
    bucket = tokens.shape[1]
    if int(lens.min()) < 1 or int(lens.max()) > bucket:
        raise PluginContractError(
            f"token_len must be in [1, {bucket}]; got {lens.tolist()}. Correct prepare()."
        )
    texts = [tuple(row[:n]) for row, n in zip(tokens.tolist(), lens.tolist(), strict=True)]
    if any(not 0 <= token < vocab for text in texts for token in text):
        outside = sorted({t for text in texts for t in text if not 0 <= t < vocab})
        raise RequestError(
            f"token ids must be in the vocabulary [0, {vocab}); got {outside[:5]}. "
            "Use the checkpoint's tokenizer."
        )
    texts += texts[:1] * (capacity - len(texts))  # what Cache.load puts there
    full = all(len(text) == bucket for text in texts)
    if even and not full:
        raise PluginContractError(
            f"rows of a key with {EVEN!r} must have {bucket} text tokens; got "
            f"{[len(text) for text in texts]}. Leave branch {branch!r} out of Key.extra."
        )
    distinct = tuple(dict.fromkeys(texts))
    number = {text: i for i, text in enumerate(distinct)}
    uniform = full if even is None else even
    return TextPlan(distinct, tuple(number[text] for text in texts), uniform)
