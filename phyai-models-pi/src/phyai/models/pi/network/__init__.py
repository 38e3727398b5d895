"""The network: prefix, expert, tables and how tokens are packed."""
