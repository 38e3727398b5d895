"""Host-side processing: camera frames, robot states and actions, sizes and noise of a request."""
