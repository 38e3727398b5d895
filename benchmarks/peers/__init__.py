"""Peers of a paired measurement: worker processes, each in an environment of its own.

Nothing here imports PhyAI except ``phyai_peer``: the other peers' environments do not have it.
"""
