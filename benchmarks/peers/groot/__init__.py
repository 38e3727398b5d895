"""GR00T N1.7: sizes and weights, our side, and the official wiring."""
