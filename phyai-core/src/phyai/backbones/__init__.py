"""Backbones that several models share: vision towers and language models under their own names."""
