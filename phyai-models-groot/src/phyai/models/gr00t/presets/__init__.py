"""The built-in presets: a tiny checkpoint made on first use, and released sizes at random."""
