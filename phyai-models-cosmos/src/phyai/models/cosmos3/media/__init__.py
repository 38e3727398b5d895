"""Media files: mp4, png and wav out, video in. PyAV is imported only when one is touched."""

from phyai.models.cosmos3.media.codecs import Encoders, check_encoder
from phyai.models.cosmos3.media.mp4 import write_mp4
from phyai.models.cosmos3.media.reading import Clip, read_clip
from phyai.models.cosmos3.media.results import SUFFIXES, write_png, write_results, write_wav
from phyai.models.cosmos3.media.whole_files import check_target

__all__ = [
    "SUFFIXES",
    "Clip",
    "Encoders",
    "check_encoder",
    "check_target",
    "read_clip",
    "write_mp4",
    "write_png",
    "write_results",
    "write_wav",
]
