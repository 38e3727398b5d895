"""Built-in presets of Cosmos3: small checkpoints in the released layout, written on first use."""
