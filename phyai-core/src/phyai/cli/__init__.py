"""The command `phyai`: run, plugins, doctor, config, verify, and what hook plugins add."""
