"""Text of a request: prompts, the chat turn around them, and token ids."""
