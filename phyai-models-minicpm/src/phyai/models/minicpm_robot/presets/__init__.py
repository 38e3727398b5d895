"""Small and full-size random checkpoints, and observations for them."""
