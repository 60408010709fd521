# An image with rollart and Ray for `rollart launch kubernetes`. Never built here: no container engine was at hand.
# On GPUs, start from an image with CUDA and install vLLM: see docs/vllm.md.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /opt/rollart
RUN pip install --no-cache-dir "/opt/rollart[ray]"
ENTRYPOINT []
