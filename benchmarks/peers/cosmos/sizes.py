"""Sizes of one Cosmos3 checkpoint: its tensors, their random values, a request.

The sizes are those of ``transformer/config.json`` and ``vae/config.json``, as they stand there.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from benchmarks.peers.cosmos.vae_shapes import CONFIG as VAE
from benchmarks.peers.cosmos.vae_shapes import autoencoder
from benchmarks.peers.shapes import Shapes, gated_mlp, linear, usual_moments
from torch import Tensor

Kind = Literal["policy", "video"]
RELEASED_LAYERS = 36
LEAST_LAYERS = 1
FRAMES = 9
"""Latent frames of a request: 33 of the camera, one and 32 actions."""
VIEW = (8, 10)
"""Latent height and width of one view, 128 x 160 pixels; views stand side by side."""
CHUNK, DOMAIN, RAW_DIM = 32, 8, 10
"""Actions of a policy request, of DROID. Its width is the only one that diffusers knows for it."""
UNCOND = 10
"""Tokens of the unconditional branch: the chat layout around an empty text."""
TRANSFORMER_FOLDER, VAE_FOLDER = "transformer", "vae"
CONFIG_FILE = "config.json"
START, END, VISION = "<|im_start|>", "<|im_end|>", "<|vision_start|>"
SAMPLING = {"policy": (3.0, 5.0, 15.0), "video": (6.0, 10.0, 24.0)}
"""Guidance, flow shift and frames per second."""

TRANSFORMER: dict[str, Any] = {
    "_class_name": "Cosmos3OmniTransformer",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": RELEASED_LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 5000000.0,
    "rope_axes_dim": [24, 20, 20],
    "rope_scaling": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_type": "default",
    },
    "qk_norm_for_text": True,
    "use_und_k_norm_for_gen": False,
    "latent_channel": 48,
    "latent_patch_size": 2,
    "patch_latent_dim": 192,
    "timestep_scale": 0.001,
    "base_fps": 24,
    "enable_fps_modulation": True,
    "unified_3d_mrope_temporal_modality_margin": 15000,
    "unified_3d_mrope_reset_spatial_ids": True,
    "action_gen": True,
    "action_dim": 64,
    "num_embodiment_domains": 32,
    "sound_gen": True,
    "sound_dim": 64,
    "sound_latent_fps": 25.0,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "UniPCMultistepScheduler",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "final_sigmas_type": "zero",
    "flow_shift": 1.0,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "sigma_max": 200.0,
    "sigma_min": 0.147,
    "solver_order": 2,
    "solver_type": "bh2",
    "timestep_spacing": "linspace",
    "use_flow_sigmas": True,
    "use_karras_sigmas": True,
}
INDEX: dict[str, Any] = {
    "_class_name": "Cosmos3OmniPipeline",
    "default_use_system_prompt": False,
    "enable_safety_checker": False,
    "use_native_flow_schedule": False,
}


@dataclass(frozen=True)
class CosmosSizes:
    """kind: what is asked of it.  transformer, vae: the fields of their config.json."""

    kind: Kind
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]

    @classmethod
    def of_depth(cls, layers: int, *, kind: Kind) -> Self:
        """Return Nano's sizes with ``layers`` layers.

        The vocabulary is cut alike, which costs no time; the autoencoder's widths by the square
        root, so that its share of the operations stays. A policy has no sound head.
        """
        transformer, vae, cut = copy.deepcopy(TRANSFORMER), copy.deepcopy(VAE), RELEASED_LAYERS
        transformer["sound_gen"] = kind == "video"
        transformer["num_hidden_layers"] = layers
        transformer["vocab_size"] = math.ceil(transformer["vocab_size"] * layers / cut)
        for name in ("base_dim", "decoder_base_dim"):
            vae[name] = max(8, 8 * round(vae[name] * math.sqrt(layers / cut) / 8))
        return cls(kind, transformer, vae)

    @classmethod
    def from_folder(cls, folder: Path, *, kind: Kind) -> Self:
        """Return the sizes in the two config.json of a checkpoint folder."""
        parts = (folder / name / CONFIG_FILE for name in (TRANSFORMER_FOLDER, VAE_FOLDER))
        return cls(kind, *(json.loads(path.read_text(encoding="utf-8")) for path in parts))

    @property
    def layers(self) -> int:
        return int(self.transformer["num_hidden_layers"])

    @property
    def vision_layers(self) -> int:
        """Levels of the video encoder."""
        return len(self.vae["dim_mult"])

    def positions(self, cameras: int, tokens: int) -> int:
        """Text tokens of both branches: all that is computed ahead of the steps."""
        return tokens + UNCOND

    def media_tokens(self, cameras: int) -> int:
        """Tokens of one evaluation of the media expert."""
        patch, (height, width) = int(self.transformer["latent_patch_size"]), VIEW
        patches = math.ceil(height / patch) * math.ceil(cameras * width / patch)
        return FRAMES * patches + (CHUNK if self.kind == "policy" else 0)

    def files(self) -> dict[str, Any]:
        """Return the JSON files beside the weights, by path."""
        return {
            "model_index.json": INDEX,
            f"{TRANSFORMER_FOLDER}/{CONFIG_FILE}": dict(self.transformer),
            f"{VAE_FOLDER}/{CONFIG_FILE}": dict(self.vae),
            "scheduler/scheduler_config.json": SCHEDULER,
            "text_tokenizer/tokenizer.json": _tokenizer(),
            "text_tokenizer/tokenizer_config.json": {"eos_token": END},
        }

    def moments(self, name: str, shape: tuple[int, ...]) -> tuple[float, float]:
        """Return mean and standard deviation that keep every activation of order one."""
        owner, _, leaf = name.rpartition(".")
        if leaf == "gamma" or "norm" in owner.rpartition(".")[2]:
            return 1.0, 0.1
        if name.endswith(("bias.weight", "_embed")):
            return 0.0, 0.1
        if owner.endswith(("action_proj_in.fc", "action_proj_out.fc")):  # a matrix per row
            inside = "action_dim" if "_in." in name else "hidden_size"
            return 0.0, 1.0 / math.sqrt(self.transformer[inside])
        return usual_moments(name, shape)

    def tensors(self) -> Shapes:
        """Yield name and shape of every tensor but those of the output head, which nobody reads."""
        for name, shape in _transformer(self.transformer):
            yield f"{TRANSFORMER_FOLDER}/{name}", shape
        for name, shape in autoencoder(self.vae):
            yield f"{VAE_FOLDER}/{name}", shape

    def inputs(
        self, cameras: int, tokens: int, rows: int, random: torch.Generator
    ) -> dict[str, Tensor]:
        """Return a request of valid inputs; names and shapes as in ``cosmos.batch.Batch``.

        cameras: views on the canvas.  tokens: of the prompt, with the layout around it.
        """
        c, (height, width) = self.transformer, VIEW
        latent = (rows, c["latent_channel"], FRAMES, height, cameras * width)

        def ids(count: int) -> Tensor:
            return torch.randint(0, c["vocab_size"], (rows, count), generator=random)

        video = torch.randn(latent, generator=random)
        found = {
            "input_ids": ids(tokens),
            "neg_input_ids": ids(UNCOND),
            "sampling": torch.tensor(SAMPLING[self.kind]),
        }
        if self.kind == "video":
            return {**found, "noise": video}
        scale = self.vae["scale_factor_spatial"]
        size = (rows, height * scale, cameras * width * scale, 3)
        return {
            **found,
            "image": torch.randint(0, 256, size, generator=random, dtype=torch.uint8),
            "video_noise": video,
            "noise": torch.randn(rows, CHUNK, RAW_DIM, generator=random),
            "domain_id": torch.full((rows,), DOMAIN),
        }


def _transformer(c: Mapping[str, Any]) -> Shapes:
    width, domains = c["hidden_size"], c["num_embodiment_domains"]
    yield "embed_tokens.weight", (c["vocab_size"], width)
    for i in range(c["num_hidden_layers"]):
        yield from _layer(f"layers.{i}", c)
    for name in ("norm", "norm_moe_gen"):
        yield f"{name}.weight", (width,)
    yield from linear("proj_in", width, c["patch_latent_dim"])
    yield from linear("proj_out", c["patch_latent_dim"], width)
    yield from linear("time_embedder.linear_1", width, 256)
    yield from linear("time_embedder.linear_2", width, width)
    if c["action_gen"]:
        for name, out in (("action_proj_in", width), ("action_proj_out", c["action_dim"])):
            yield f"{name}.fc.weight", (domains, c["action_dim"] * width)
            yield f"{name}.bias.weight", (domains, out)
        yield "action_modality_embed", (width,)
    if c["sound_gen"]:
        yield from linear("audio_proj_in", width, c["sound_dim"])
        yield from linear("audio_proj_out", c["sound_dim"], width)
        yield "audio_modality_embed", (width,)


def _layer(layer: str, c: Mapping[str, Any]) -> Shapes:
    """The text expert's half of a layer and the media expert's."""
    width, mlp, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    halves = (
        ("", ("to_q", "to_k", "to_v", "to_out"), ("norm_q", "norm_k")),
        (
            "_moe_gen",
            ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            ("norm_added_q", "norm_added_k"),
        ),
    )
    for suffix, (q, k, v, out), norms in halves:
        yield f"{layer}.input_layernorm{suffix}.weight", (width,)
        yield f"{layer}.post_attention_layernorm{suffix}.weight", (width,)
        for name, rows in ((q, queries), (k, keys), (v, keys)):
            yield f"{layer}.self_attn.{name}.weight", (rows, width)
        yield f"{layer}.self_attn.{out}.weight", (width, queries)
        for name in norms:
            yield f"{layer}.self_attn.{name}.weight", (head,)
        for name, shape in gated_mlp(layer, width, mlp):
            yield name.replace(".mlp.", f".mlp{suffix}."), shape


def _tokenizer() -> dict[str, Any]:
    """Return a tokenizer of the layout's words alone: requests here come as token ids."""
    words = {word: i for i, word in enumerate((START, END, VISION, "<unk>"))}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": words[word], "content": word, **flags, "special": True}
            for word in (START, END, VISION)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
