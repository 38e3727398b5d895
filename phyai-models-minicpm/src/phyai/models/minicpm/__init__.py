"""What MiniCPM-RobotManip and MiniCPM-RobotTrack share: reading weights, text and camera frames."""
