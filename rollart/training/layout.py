"""The names in a checkpoint folder beside those of the Hugging Face model; importing this needs no torch."""

MANIFEST = "checkpoint.json"
OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
TRAINER_FILES = (MANIFEST, OPTIMIZER, REFERENCE)
