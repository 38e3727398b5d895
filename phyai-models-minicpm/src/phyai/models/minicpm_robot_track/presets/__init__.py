"""Presets that need no download."""
