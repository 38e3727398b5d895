"""Host-side processing of GR00T: observation -> model inputs, model actions -> robot commands."""
