"""Measuring: operations and bytes by shapes, stage times, rooflines, their tables and pictures."""
