"""Sizes of one GR00T N1.7 checkpoint: its tensors, their random values, a request.

The sizes are the official ``config.json`` and the backbone's config, as they stand in the folder.
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
    category,
    diffusion_transformer,
    gated_mlp,
    grouped_attention,
    head_norms,
    layer_norms,
    linear,
    norm,
    transformer_block,
    usual_moments,
)
from torch import Tensor

RELEASED_LAYERS = 16
LEAST_LAYERS = 4
"""Fewer leave no room for three deepstack taps in the vision tower and one round of the DiT."""
IMAGE = 256
TAPS = (5, 11, 17)
BACKBONE_FILE = "qwen3_vl_config.json"
UNUSED = ("backbone.model.lm_head.", "backbone.model.model.language_model.norm.")
"""Keys of a released checkpoint whose result nobody reads."""

CONFIG: dict[str, Any] = {
    "model_type": "Gr00tN1d7",
    "architectures": ["Gr00tN1d7"],
    "dtype": "bfloat16",
    "model_dtype": "bfloat16",
    "model_name": "nvidia/Cosmos-Reason2-2B",
    "backbone_model_type": "qwen",
    "backbone_embedding_dim": 2048,
    "select_layer": RELEASED_LAYERS,
    "max_state_dim": 132,
    "max_action_dim": 132,
    "action_horizon": 40,
    "state_history_length": 1,
    "hidden_size": 1024,
    "input_embedding_dim": 1536,
    "max_num_embodiments": 32,
    "max_seq_len": 1024,
    "add_pos_embed": True,
    "use_vlln": True,
    "use_alternate_vl_dit": True,
    "attend_text_every_n_blocks": 2,
    "diffusion_model_cfg": {
        "positional_embeddings": None,
        "num_layers": 32,
        "num_attention_heads": 32,
        "attention_head_dim": 48,
        "norm_type": "ada_norm",
        "dropout": 0.2,
        "final_dropout": True,
        "output_dim": 1024,
        "interleave_self_attention": True,
    },
    "vl_self_attention_cfg": {
        "positional_embeddings": None,
        "num_layers": 4,
        "num_attention_heads": 32,
        "attention_head_dim": 64,
        "dropout": 0.2,
        "final_dropout": True,
    },
    "num_inference_timesteps": 4,
    "num_timestep_buckets": 1000,
}
BACKBONE: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "pad_token_id": 151643,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "deepstack_visual_indexes": list(TAPS),
        "depth": 24,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1024,
        "in_channels": 3,
        "intermediate_size": 4096,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}


@dataclass(frozen=True)
class GrootSizes:
    """config: the fields of config.json.  backbone: those of the backbone's own config."""

    config: Mapping[str, Any]
    backbone: Mapping[str, Any]

    @classmethod
    def of_depth(cls, layers: int) -> Self:
        """Return the released sizes with ``layers`` text layers; all other stacks cut alike."""
        config, backbone = copy.deepcopy(CONFIG), copy.deepcopy(BACKBONE)
        config["select_layer"] = layers
        for part in ("diffusion_model_cfg", "vl_self_attention_cfg"):
            full = config[part]["num_layers"]
            config[part]["num_layers"] = math.ceil(full * layers / RELEASED_LAYERS)
        vision = backbone["vision_config"]
        full = vision["depth"]
        vision["depth"] = math.ceil(full * layers / RELEASED_LAYERS)
        vision["deepstack_visual_indexes"] = [tap * vision["depth"] // full for tap in TAPS]
        return cls(config, backbone)

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Return the sizes in config.json and qwen3_vl_config.json of a checkpoint folder."""
        read = [
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in ("config.json", BACKBONE_FILE)
        ]
        return cls(*read)

    @property
    def text(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.backbone["text_config"]
        return found

    @property
    def vision(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.backbone["vision_config"]
        return found

    @property
    def dit(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["diffusion_model_cfg"]
        return found

    @property
    def vlsa(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.config["vl_self_attention_cfg"]
        return found

    @property
    def layers(self) -> int:
        return int(self.config["select_layer"])

    @property
    def vision_layers(self) -> int:
        return int(self.vision["depth"])

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera of 256 x 256 pixels, without the two that enclose them."""
        return int((IMAGE // (self.vision["patch_size"] * self.vision["spatial_merge_size"])) ** 2)

    def positions(self, cameras: int, tokens: int) -> int:
        """Length of the sequence: images with the tokens that enclose them, and other tokens."""
        return cameras * (self.image_tokens + 2) + tokens

    def files(self) -> dict[str, Any]:
        """Return the JSON files beside the weights, by name."""
        return {"config.json": dict(self.config), BACKBONE_FILE: dict(self.backbone)}

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and standard deviation that keep every activation of order one."""
        owner, _, leaf = name.rpartition(".")
        if "norm" in owner.rpartition(".")[2] or owner.endswith("vlln"):
            return (1.0, 0.1) if leaf == "weight" else (0.0, 0.1)
        return usual_moments(name, shape)

    def tensors(self) -> Shapes:
        """Yield name and shape of every tensor that inference reads."""
        yield from _vision("backbone.model.model.visual", self.vision)
        yield from _text("backbone.model.model.language_model", self.text, self.layers)
        yield from self._head("action_head")

    def _head(self, root: str) -> Shapes:
        c, feature = self.config, self.config["backbone_embedding_dim"]
        width, hidden, out = c["input_embedding_dim"], c["hidden_size"], self.dit["output_dim"]
        many, actions = c["max_num_embodiments"], c["max_action_dim"]
        state = c["max_state_dim"] * c["state_history_length"]
        yield from norm(f"{root}.vlln", feature)
        for i in range(self.vlsa["num_layers"]):
            block = f"{root}.vl_self_attention.transformer_blocks.{i}"
            yield from norm(f"{block}.norm1", feature)
            yield from norm(f"{block}.norm3", feature)
            yield from transformer_block(block, feature, feature)
        yield from category(f"{root}.state_encoder.layer1", many, state, hidden)
        yield from category(f"{root}.state_encoder.layer2", many, hidden, width)
        yield from action_coders(
            root, many=many, into=actions, width=width, hidden=hidden, out=out, actions=actions
        )
        yield f"{root}.position_embedding.weight", (c["max_seq_len"], width)
        yield from diffusion_transformer(
            f"{root}.model", layers=self.dit["num_layers"], width=width, feature=feature, out=out
        )

    def inputs(
        self, cameras: int, tokens: int, rows: int, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Return a request of valid inputs; names and shapes as in ``groot.batch.Batch``.

        tokens: those outside the images and the two that enclose each; the first three precede
        the images, as the chat layout has it.
        """
        v, b, c = self.vision, self.backbone, self.config
        side = IMAGE // v["patch_size"]
        pixels = v["in_channels"] * v["patch_size"] ** 2
        frame = torch.rand(rows * cameras * side**2, pixels, generator=random) * 2 - 1
        frame = frame.view(-1, v["in_channels"], 1, v["patch_size"] ** 2)
        patches = frame.expand(-1, -1, v["temporal_patch_size"], -1).flatten(1)
        special = [b[f"{name}_token_id"] for name in ("image", "video", "vision_start",
                                                      "vision_end")]  # fmt: skip
        words_below = min(*special, self.text["pad_token_id"] or special[0])
        words = torch.randint(0, words_below, (rows, tokens), generator=random)
        image = [special[2], *[special[0]] * self.image_tokens, special[3]]
        images = torch.tensor(image * cameras).expand(rows, -1)
        ids = torch.cat([words[:, :3], images, words[:, 3:]], dim=1)
        return {
            "pixel_values": patches.contiguous(),
            "image_grid_thw": torch.tensor([[1, side, side]]).repeat(rows * cameras, 1),
            "input_ids": ids.contiguous(),
            "attention_mask": torch.ones_like(ids),
            "state": torch.rand(rows, c["state_history_length"], c["max_state_dim"],
                                generator=random) * 2 - 1,
            "embodiment_id": (torch.arange(rows) + 2) % c["max_num_embodiments"],
            "noise": torch.randn(rows, c["action_horizon"], c["max_action_dim"], generator=random),
        }  # fmt: skip


def _vision(root: str, v: Mapping[str, Any]) -> Shapes:
    width, merged = v["hidden_size"], v["hidden_size"] * v["spatial_merge_size"] ** 2
    patch = (v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    yield f"{root}.patch_embed.proj.weight", (width, *patch)
    yield f"{root}.patch_embed.proj.bias", (width,)
    yield f"{root}.pos_embed.weight", (v["num_position_embeddings"], width)
    for i in range(v["depth"]):
        block = f"{root}.blocks.{i}"
        yield from norm(f"{block}.norm1", width)
        yield from norm(f"{block}.norm2", width)
        yield from linear(f"{block}.attn.qkv", 3 * width, width)
        yield from linear(f"{block}.attn.proj", width, width)
        yield from linear(f"{block}.mlp.linear_fc1", v["intermediate_size"], width)
        yield from linear(f"{block}.mlp.linear_fc2", width, v["intermediate_size"])
    mergers = {f"{root}.merger": width}
    mergers |= {
        f"{root}.deepstack_merger_list.{j}": merged
        for j in range(len(v["deepstack_visual_indexes"]))
    }
    for merger, normed in mergers.items():
        yield from norm(f"{merger}.norm", normed)
        yield from linear(f"{merger}.linear_fc1", merged, merged)
        yield from linear(f"{merger}.linear_fc2", v["out_hidden_size"], merged)


def _text(root: str, t: Mapping[str, Any], layers: int) -> Shapes:
    width, head, mlp = t["hidden_size"], t["head_dim"], t["intermediate_size"]
    query, keys = t["num_attention_heads"] * head, t["num_key_value_heads"] * head
    yield f"{root}.embed_tokens.weight", (t["vocab_size"], width)
    for i in range(layers):
        layer = f"{root}.layers.{i}"
        yield from grouped_attention(layer, width, query, keys)
        yield from head_norms(layer, head)
        yield from gated_mlp(layer, width, mlp)
        yield from layer_norms(layer, width)
