"""The network: image tower, hybrid decoder, action head."""
