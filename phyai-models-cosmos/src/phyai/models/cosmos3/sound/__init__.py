"""The sound decoder: latents at 25 Hz to a stereo waveform at 48 kHz."""

from phyai.models.cosmos3.sound.config import SoundConfig
from phyai.models.cosmos3.sound.decoder import SoundDecoder

__all__ = ["SoundConfig", "SoundDecoder"]
