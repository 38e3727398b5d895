"""The policy keeps the adapter contract."""

from phyai.testing import AdapterConformance


class TestACT(AdapterConformance):
    manifest = "act"
    level = 2
