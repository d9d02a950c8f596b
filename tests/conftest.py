"""For all tests: examples take as long as a busy machine needs for them."""

from hypothesis import settings

settings.register_profile("argosy", deadline=None)
settings.load_profile("argosy")
