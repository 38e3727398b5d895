"""Limits on actions, for any adapter; the entry point is ``action_clamp.plugin``."""
