"""Cosmos3: sizes and weights, our side, and the pipeline of diffusers."""
