from hypothesis import settings

# A busy machine must not turn a slow example into a failure.
settings.register_profile("formulas", deadline=None, max_examples=50)
settings.load_profile("formulas")
