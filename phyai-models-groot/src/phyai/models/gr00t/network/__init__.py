"""The network: features of the backbone, encoders per embodiment, the diffusion transformer."""
