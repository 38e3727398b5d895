"""Golden cases of pi0 and pi0.5, turned into runs of the engine."""
