"""For all tests: no deadline per example of a property test, since other processes may be busy on the same cores."""

from hypothesis import HealthCheck, settings

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shoal")
