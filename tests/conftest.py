import os

from hypothesis import HealthCheck, settings

# Tiny models are slower, not faster, with several threads; and nothing may try to reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine is no failure: neither a slow example nor slow drawing of examples.
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")
