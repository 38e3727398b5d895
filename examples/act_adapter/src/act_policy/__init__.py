"""A regression policy behind PhyAI; the entry point is ``act_policy.plugin``."""
