"""The network: vision tokens, decoder, trajectory head."""
