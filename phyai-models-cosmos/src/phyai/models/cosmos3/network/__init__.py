"""The transformer: text and media experts, heads of the media, positions and costs."""
