"""pi0 and pi0.5: sizes and weights, our side, and the peers that compute them."""
