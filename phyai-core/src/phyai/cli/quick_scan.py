"""A cheap answer to "is any hook plugin installed?", so that `phyai --help` stays quick.

Reading metadata properly costs more than the whole of --help. This looks for the group's name in
the entry points of unpacked distributions, and says yes whenever it cannot be sure.
"""

from __future__ import annotations

import os
import sys

HOOK_GROUP = b"phyai.hooks"
SUFFIXES = (".dist-info", ".egg-info")


def may_have_hooks() -> bool:
    """Return False only when no distribution on the import path offers the hook group."""
    if any(_finds_distributions(finder) for finder in sys.meta_path):
        return True
    return any(_folder_may(folder or os.curdir) for folder in dict.fromkeys(sys.path))


def _finds_distributions(finder: object) -> bool:
    """Whether an import finder of somebody else's brings distributions of its own."""
    standard = getattr(finder, "__module__", "") in (
        "_frozen_importlib",
        "_frozen_importlib_external",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
    )
    return not standard and hasattr(finder, "find_distributions")


def _folder_may(folder: str) -> bool:
    if os.path.isfile(folder):
        return True  # an archive
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    for name in names:
        stem, suffix = os.path.splitext(name)
        if suffix not in SUFFIXES or not stem:
            continue
        try:
            with open(os.path.join(folder, name, "entry_points.txt"), "rb") as file:
                if HOOK_GROUP in file.read():
                    return True
        except OSError:  # has no entry points
            continue
    return False
