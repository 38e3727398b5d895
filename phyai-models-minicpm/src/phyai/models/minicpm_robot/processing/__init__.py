"""From observations to model inputs, and from model actions to robot commands; host only."""
