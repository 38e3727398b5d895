"""The policy keeps the adapter contract."""

from phyai.testing import AdapterConformance


class TestMyPolicy(AdapterConformance):
    manifest = "my_policy"
    level = 2
