import os

# Tiny models are slower, not faster, with several threads; and nothing may try to reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
