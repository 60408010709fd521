import os

from hypothesis import HealthCheck, settings

# Tiny models are slower, not faster, with several threads; and nothing may try to reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A busy machine is no failure: neither a slow example nor slow drawing of examples.
PACE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples everywhere, so that a change is refused only for what it broke; `make fuzz` draws new ones.
settings.register_profile("same examples", derandomize=True, **PACE)
settings.register_profile("new examples", print_blob=True, **PACE)
settings.load_profile("same examples")
