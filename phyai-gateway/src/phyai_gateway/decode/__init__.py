"""Readers of what clients send. None executes or imports anything named in the bytes."""
