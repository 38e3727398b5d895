"""Wire protocols that robots speak, each on its own listener; found by entry point."""
