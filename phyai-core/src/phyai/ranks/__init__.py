"""The ranks of one replica at work: what rank 0 says all do, and all agree how it went."""

from phyai.ranks.loading import loading_of
from phyai.ranks.together import REQUEST, UPDATE, Ranks

__all__ = ["REQUEST", "UPDATE", "Ranks", "loading_of"]
