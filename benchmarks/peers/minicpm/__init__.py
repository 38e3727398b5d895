"""MiniCPM-RobotManip: sizes and weights, our side, and the official wiring."""
