"""A PhyAI adapter; the entry point is ``my_policy.plugin``."""
