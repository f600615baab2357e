"""Settings of the whole suite: property tests have no deadline, because a loaded machine is not a failure."""

from hypothesis import settings

settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
