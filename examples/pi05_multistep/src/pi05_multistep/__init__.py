"""A solver for plugin ``pi05`` from outside; the entry point is ``pi05_multistep.plugin``."""
