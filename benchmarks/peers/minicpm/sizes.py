"""Sizes of one MiniCPM-RobotManip checkpoint: its tensors, their random values, a request.

The sizes are those of ``config.json``, as it stands in the folder.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from benchmarks.peers.shapes import (
    Shapes,
    action_coders,
    attention,
    diffusion_transformer,
    gated_mlp,
    grouped_attention,
    head_norms,
    layer_norms,
    linear,
    norm,
    siglip,
    usual_moments,
)
from torch import Tensor

RELEASED_LAYERS = 24
LEAST_LAYERS = 4
"""Fewer leave no layer of full attention."""
IMAGE = 448
AROUND = 5
"""Tokens around those of an image: two and a number that name it, two that enclose it."""
UNUSED = "vlm.llm.lm_head."
"""Tied to the embedding, and read by nobody."""
LINEAR, FULL = "linear_attention", "full_attention"

CONFIG: dict[str, Any] = {
    "architectures": ["MiniCPMV_VLA"],
    "insert_layer_id": 6,
    "image_token_id": 248056,
    "video_token_id": 248057,
    "image_size": IMAGE,
    "downsample_mode": "16x",
    "merge_kernel_size": [2, 2],
    "merger_times": 1,
    "drop_vision_last_layer": False,
    "tie_word_embeddings": True,
    "vision_config": {
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_channels": 3,
        "image_size": 980,
        "patch_size": 14,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
        "attention_dropout": 0.0,
        "insert_layer_id": 6,
        "window_kernel_size": [2, 2],
    },
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248094,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": RELEASED_LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL] * 6,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
    "action_head_cfg": {
        "hidden_size": 1024,
        "action_dim": 80,
        "state_dim": 80,
        "action_horizon": 30,
        "num_inference_timesteps": 4,
        "num_target_vision_tokens": 32,
        "max_seq_len": 1024,
        "num_timestep_buckets": 1000,
        "add_pos_embed": True,
        "proprio_inject": "concat",
        "prediction_type": "clean_action",
        "max_num_embodiments": 32,
        "diffusion_model_cfg": {
            "num_attention_heads": 12,
            "attention_head_dim": 64,
            "input_embedding_dim": 768,
            "num_layers": 16,
            "cross_attention_dim": 1024,
            "output_dim": 1024,
            "dropout": 0.2,
            "final_dropout": True,
            "interleave_self_attention": True,
            "norm_type": "ada_norm",
            "positional_embeddings": None,
        },
    },
}


@dataclass(frozen=True)
class MiniCPMSizes:
    """config: the fields of config.json."""

    config: Mapping[str, Any]

    @classmethod
    def of_depth(cls, layers: int) -> Self:
        """Return the released sizes with ``layers`` text layers; all other stacks cut alike."""
        config = copy.deepcopy(CONFIG)
        text, vision = config["text_config"], config["vision_config"]
        dit = config["action_head_cfg"]["diffusion_model_cfg"]
        text["num_hidden_layers"] = layers
        text["layer_types"] = text["layer_types"][:layers]
        full, insert = vision["num_hidden_layers"], vision["insert_layer_id"]
        vision["num_hidden_layers"] = math.ceil(full * layers / RELEASED_LAYERS)
        config["insert_layer_id"] = insert * vision["num_hidden_layers"] // full
        vision["insert_layer_id"] = config["insert_layer_id"]
        # Cross attention and self-attention alternate: whole pairs only.
        pairs = dit["num_layers"] // 2
        dit["num_layers"] = 2 * math.ceil(pairs * layers / RELEASED_LAYERS)
        return cls(config)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Return the sizes in config.json of a checkpoint folder."""
        return cls(json.loads((folder / "config.json").read_text(encoding="utf-8")))

    @property
    def text(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["text_config"]
        return found

    @property
    def vision(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["vision_config"]
        return found

    @property
    def head(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["action_head_cfg"]
        return found

    @property
    def dit(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.head["diffusion_model_cfg"]
        return found

    @property
    def layers(self) -> int:
        return int(self.text["num_hidden_layers"])

    @property
    def vision_layers(self) -> int:
        return int(self.vision["num_hidden_layers"])

    @property
    def side(self) -> int:
        """Patches along one side of a camera of 448 x 448 pixels."""
        return int(IMAGE // self.vision["patch_size"])

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera, behind both mergers and without those around it."""
        return (self.side // 4) ** 2

    def positions(self, cameras: int, tokens: int) -> int:
        """Length of the sequence: images with the tokens around them, and other tokens."""
        return cameras * (self.image_tokens + AROUND) + tokens

    def files(self) -> dict[str, Any]:
        """Return the JSON files beside the weights, by name."""
        return {"config.json": dict(self.config)}

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and standard deviation that keep every activation of order one."""
        owner, _, leaf = name.rpartition(".")
        if leaf == "A_log":
            return 0.0, 0.5
        if leaf == "dt_bias":
            return -1.0, 0.5
        if "norm" in owner.rpartition(".")[2] and "norm1.linear" not in owner:
            # Those of the text are added to one, but for the gated one.
            centred = owner.startswith("vlm.llm.") and not owner.endswith("linear_attn.norm")
            return (1.0 if leaf == "weight" and not centred else 0.0), 0.1
        return usual_moments(name, shape)

    def tensors(self) -> Shapes:
        """Yield name and shape of every tensor that inference reads."""
        yield from _vision(self.vision, self.text["hidden_size"])
        yield from _text("vlm.llm.model", self.text)
        yield from self._head("action_head")

    def _head(self, root: str) -> Shapes:
        c, feature = self.head, self.dit["cross_attention_dim"]
        width, out = self.dit["input_embedding_dim"], self.dit["output_dim"]
        many, actions, hidden = c["max_num_embodiments"], c["action_dim"], c["hidden_size"]
        into = actions + c["state_dim"]
        yield from action_coders(
            root, many=many, into=into, width=width, hidden=hidden, out=out, actions=actions
        )
        yield f"{root}.future_tokens.weight", (c["num_target_vision_tokens"], width)
        yield f"{root}.position_embedding.weight", (c["max_seq_len"], width)
        yield from diffusion_transformer(
            f"{root}.model", layers=self.dit["num_layers"], width=width, feature=feature, out=out
        )

    def inputs(
        self, cameras: int, tokens: int, rows: int, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Return a request of valid inputs; names and shapes as in ``minicpm.batch.Batch``.

        tokens: those outside the images and the five around each; the first three precede the
        images, as the chat layout has it.
        """
        v, c, image = self.vision, self.head, self.config["image_token_id"]
        patch, patches = v["patch_size"], rows * cameras * self.side**2
        strip = torch.rand(1, v["num_channels"], patch, patch * patches, generator=random) * 2 - 1
        around = torch.randint(0, image, (rows, cameras, AROUND), generator=random)
        pads = torch.full((rows, cameras, self.image_tokens), image)
        images = torch.cat([around[..., :4], pads, around[..., 4:]], dim=2).flatten(1)
        words = torch.randint(0, image, (rows, tokens), generator=random)
        return {
            "pixel_values": strip,
            "target_sizes": torch.full((rows * cameras, 2), self.side, dtype=torch.int32),
            "input_ids": torch.cat([words[:, :3], images, words[:, 3:]], dim=1),
            "state": torch.rand(rows, c["state_dim"], generator=random) * 2 - 1,
            "embodiment_id": (torch.arange(rows) + 2) % c["max_num_embodiments"],
            "noise": torch.randn(rows, c["action_horizon"], c["action_dim"], generator=random),
        }


def _vision(v: Mapping[str, Any], text_width: int) -> Shapes:
    width, mlp, patch = v["hidden_size"], v["intermediate_size"], v["patch_size"]
    yield from siglip(
        "vlm.vpm",
        width=width,
        mlp=mlp,
        layers=v["num_hidden_layers"],
        channels=v["num_channels"],
        patch=patch,
        places=(v["image_size"] // patch) ** 2,
    )
    merger, window = "vlm.vit_merger", math.prod(v["window_kernel_size"])
    yield from norm(f"{merger}.layer_norm1", width)
    yield from attention(f"{merger}.self_attn", width)
    yield from norm(f"{merger}.pre_norm", window * width)
    yield from linear(f"{merger}.linear_1", window * mlp, window * width)
    yield from linear(f"{merger}.linear_2", width, window * mlp)
    last = "vlm.resampler.mlp.0"
    yield from norm(f"{last}.pre_norm", 4 * width)
    yield from linear(f"{last}.mlp.0", 4 * width, 4 * width)
    yield from linear(f"{last}.mlp.2", text_width, 4 * width)


def _text(root: str, t: Mapping[str, Any]) -> Shapes:
    width, mlp = t["hidden_size"], t["intermediate_size"]
    yield f"{root}.embed_tokens.weight", (t["vocab_size"], width)
    for i, kind in enumerate(t["layer_types"]):
        layer = f"{root}.layers.{i}"
        yield from layer_norms(layer, width)
        yield from gated_mlp(layer, width, mlp)
        yield from (_delta if kind == LINEAR else _gated)(layer, t)
    yield f"{root}.norm.weight", (width,)


def _gated(layer: str, t: Mapping[str, Any]) -> Shapes:
    """Full attention: the queries come with a gate of the same size."""
    width, head = t["hidden_size"], t["head_dim"]
    queries, keys = t["num_attention_heads"] * head, t["num_key_value_heads"] * head
    yield from grouped_attention(layer, width, queries, keys, gated=True)
    yield from head_norms(layer, head)


def _delta(layer: str, t: Mapping[str, Any]) -> Shapes:
    """The gated delta rule."""
    width, heads, head = t["hidden_size"], t["linear_num_value_heads"], t["linear_value_head_dim"]
    keys, values = t["linear_num_key_heads"] * t["linear_key_head_dim"], heads * head
    owner = f"{layer}.linear_attn"
    yield f"{owner}.in_proj_qkv.weight", (2 * keys + values, width)
    yield f"{owner}.in_proj_z.weight", (values, width)
    yield f"{owner}.in_proj_a.weight", (heads, width)
    yield f"{owner}.in_proj_b.weight", (heads, width)
    yield f"{owner}.conv1d.weight", (2 * keys + values, 1, t["linear_conv_kernel_dim"])
    yield f"{owner}.A_log", (heads,)
    yield f"{owner}.dt_bias", (heads,)
    yield f"{owner}.norm.weight", (head,)
    yield f"{owner}.out_proj.weight", (width, values)
