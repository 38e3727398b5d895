"""What adapter authors and the test-suite use to check a plugin."""
