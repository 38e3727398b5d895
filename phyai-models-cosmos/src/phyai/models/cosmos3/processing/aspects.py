"""Says once when a picture is not of the aspect ratio that it is brought to."""

from __future__ import annotations

import logging
from functools import lru_cache

from phyai.models.cosmos3.processing.canvas import Size

TOLERANCE = 0.02
"""Of the aspect ratio: what rounding to whole pixels does is less."""

log = logging.getLogger("phyai")


def fits(have: Size, want: Size) -> bool:
    """Return whether two sizes (height, width) have one aspect ratio within ``TOLERANCE``.

    >>> fits((1080, 1280), (540, 640)), fits((360, 640), (540, 640))
    (True, False)
    """
    ratio = (have[1] * want[0]) / (have[0] * want[1])
    return 1.0 - TOLERANCE <= ratio <= 1.0 + TOLERANCE


@lru_cache(maxsize=1024)  # once per size: a robot sends many pictures of one
def tell_aspect(name: str, have: Size, want: Size, so: str) -> None:
    """Log a warning unless a picture has the aspect ratio of the size it is brought to.

    so: what is done to it, and what to do about that.
    """
    if not fits(have, want):
        log.warning(
            "%s should have the aspect ratio of %d x %d within %g %%; got %d x %d, which is %s",
            *(name, *want, 100 * TOLERANCE, *have, so),
        )
