"""For tests of environments: a cache folder of each test's own."""

from kit.data import own_cache

__all__ = ["own_cache"]
