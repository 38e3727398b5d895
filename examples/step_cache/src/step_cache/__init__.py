"""A step cache for pi0 and pi0.5; the entry point is ``step_cache.plugin``."""
