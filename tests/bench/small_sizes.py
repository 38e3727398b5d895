"""Sizes of each model that run in a moment: the released layers' kinds, small widths."""

from __future__ import annotations

import dataclasses

from benchmarks.peers.cosmos.sizes import CosmosSizes, Kind
from benchmarks.peers.groot.sizes import GrootSizes
from benchmarks.peers.minicpm.sizes import MiniCPMSizes
from benchmarks.peers.model import Sizes
from benchmarks.peers.pi.sizes import Decoder, PiSizes, Vision


def small_pi(model: str = "pi05") -> PiSizes:
    decoder = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16, "vocab_size": 64}
    small = PiSizes(
        vision=Vision(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
            image_size=56,
        ),
        text=Decoder(hidden_size=48, intermediate_size=64, **decoder),
        expert=Decoder(hidden_size=32, intermediate_size=64, **decoder),
        chunk=6, action_dim=8, state_dim=5,
    )  # fmt: skip
    return dataclasses.replace(small, model=model)


def small_groot() -> GrootSizes:
    whole = GrootSizes.of_depth(4)
    config, backbone = dict(whole.config), dict(whole.backbone)
    config |= {
        "backbone_embedding_dim": 64, "hidden_size": 40, "input_embedding_dim": 48,
        "max_state_dim": 12, "max_action_dim": 10, "action_horizon": 8, "max_num_embodiments": 6,
        "max_seq_len": 32,
        "diffusion_model_cfg": {**config["diffusion_model_cfg"], "num_attention_heads": 4,
                                "attention_head_dim": 12, "output_dim": 40},
        "vl_self_attention_cfg": {**config["vl_self_attention_cfg"], "num_attention_heads": 4,
                                  "attention_head_dim": 16},
    }  # fmt: skip
    backbone |= {
        "image_token_id": 261, "video_token_id": 262, "vision_start_token_id": 259,
        "vision_end_token_id": 260,
        "text_config": {**backbone["text_config"], "head_dim": 16, "hidden_size": 64,
                        "intermediate_size": 96, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "pad_token_id": 256, "vocab_size": 288,
                        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2],
                                         "rope_type": "default"}},
        "vision_config": {**backbone["vision_config"], "hidden_size": 32, "num_heads": 4,
                          "intermediate_size": 48, "num_position_embeddings": 64,
                          "out_hidden_size": 64},
    }  # fmt: skip
    return GrootSizes(config, backbone)


def small_minicpm() -> MiniCPMSizes:
    config = dict(MiniCPMSizes.of_depth(4).config)
    text, head = config["text_config"], config["action_head_cfg"]
    config |= {
        "image_token_id": 261, "video_token_id": 262,
        "vision_config": {**config["vision_config"], "hidden_size": 32, "intermediate_size": 48,
                          "num_attention_heads": 4, "image_size": 140},
        "text_config": {**text, "vocab_size": 288, "hidden_size": 64, "intermediate_size": 96,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
                        "linear_num_key_heads": 4, "linear_num_value_heads": 16,
                        "rope_parameters": {**text["rope_parameters"],
                                            "mrope_section": [2, 1, 1]}},
        "action_head_cfg": {**head, "hidden_size": 40, "action_dim": 10, "state_dim": 12,
                            "action_horizon": 8, "num_target_vision_tokens": 5,
                            "max_seq_len": 32, "max_num_embodiments": 6,
                            "diffusion_model_cfg": {
                                **head["diffusion_model_cfg"], "num_attention_heads": 4,
                                "attention_head_dim": 12, "input_embedding_dim": 48,
                                "cross_attention_dim": 64, "output_dim": 40}},
    }  # fmt: skip
    return MiniCPMSizes(config)


def small_cosmos(kind: Kind) -> CosmosSizes:
    whole = CosmosSizes.of_depth(2, kind=kind)
    transformer = {
        **whole.transformer, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 288,
        "rope_axes_dim": [4, 2, 2], "num_embodiment_domains": 12, "action_dim": 12, "sound_dim": 6,
        "latent_channel": 8, "patch_latent_dim": 32,
        "rope_scaling": {**whole.transformer["rope_scaling"], "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    vae = {
        **whole.vae, "base_dim": 8, "decoder_base_dim": 8, "z_dim": 8, "num_res_blocks": 1,
        "latents_mean": whole.vae["latents_mean"][:8], "latents_std": whole.vae["latents_std"][:8],
    }  # fmt: skip
    return CosmosSizes(kind, transformer, vae)


SMALL: dict[str, Sizes] = {
    "pi05": small_pi(),
    "pi0": small_pi("pi0"),
    "gr00t_n17": small_groot(),
    "minicpm_robot": small_minicpm(),
    "cosmos3_policy": small_cosmos("policy"),
    "cosmos3": small_cosmos("video"),
}
