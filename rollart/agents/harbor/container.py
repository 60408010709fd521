"""A task's Dockerfile built by podman or docker: its FROM, its RUNs as root, all of it.

The invariants:
- The name of the image is a digest of the files that it is built from, so a changed task has another image.
- The folders that the task uses lie in the image under `SEED`, with links from / to the work folder in their place. A
  trial copies them there, so its root stays read-only, and the work folder is all that is carried to the verifier.
- Nothing is built or pulled while episodes wait: `rollart envs images` does it before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rollart.agents.harbor.image import SEED, SYSTEM, Image, roots_of
from rollart.sandbox.bubblewrap import WORK, SandboxError
from rollart.sandbox.container import container_engine, run_engine

KEPT = {"/opt", "/root", "/run", "/srv", "/var"}  # of the image, read-only: programs and their data
BUILD_S = 1800.0
PREPARE = f"""
USER 0
WORKDIR /
RUN mkdir -p {SEED} && for folder in {{folders}}; do \\
if [ -e /$folder ]; then mv /$folder {SEED}/$folder; else mkdir {SEED}/$folder; fi && ln -s {WORK}/$folder /$folder; \\
done && chmod -R a+rX {SEED}
WORKDIR {{workdir}}
"""


def container_image(environment: Path, texts: Sequence[str]) -> Image:
    """The built image. Raises ValueError if it is not there, SandboxError without an engine."""
    name, roots = _named(environment, texts)
    found = run_engine("image", "inspect", "--format", "{{json .Config}}", name)
    if found is None:
        raise ValueError(
            f"the image of {environment} is not built on this machine; `rollart envs images RUN.yaml` does"
        )
    about = json.loads(found)
    variables = dict(each.partition("=")[::2] for each in about.get("Env") or [])
    variables.pop("PATH", None)  # the container has it
    return Image(about.get("WorkingDir") or "/app", variables, (), roots, container=name)


def is_built(environment: Path, texts: Sequence[str]) -> bool:
    return run_engine("image", "inspect", "--format", "{{.Id}}", _named(environment, texts)[0]) is not None


def build(environment: Path, texts: Sequence[str]) -> str:
    """The name of the image, built if it is not there. Its FROM is pulled if need be. Raises SandboxError."""
    name, roots = _named(environment, texts)
    if is_built(environment, texts):
        return name
    folders = " ".join(root[1:] for root in roots)
    with tempfile.TemporaryDirectory() as folder:
        context = Path(folder) / "context"
        shutil.copytree(environment, context, symlinks=True)
        file = context / "Dockerfile"
        text = _dockerfile(environment)
        workdir = [line.split()[1] for line in text.splitlines() if line.upper().startswith("WORKDIR ")]
        file.write_text(text + PREPARE.format(folders=folders, workdir=(workdir or ["/app"])[-1]))
        made = subprocess.run(
            [str(container_engine()), "build", "--quiet", "--tag", name, "--file", str(file), str(context)],
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    if made.returncode:
        raise SandboxError(f"the image of {environment} could not be built: {made.stderr.strip()[-500:]}")
    return name


def _named(environment: Path, texts: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    if container_engine() is None:
        raise SandboxError(f"the image of {environment} needs podman or docker, and neither is installed")
    text = _dockerfile(environment)
    roots = tuple(root for root in roots_of(text, texts) if root not in KEPT | SYSTEM)
    digest = hashlib.sha256(f"{PREPARE} {roots}".encode())
    for path in sorted(environment.rglob("*")):
        digest.update(f"{path.relative_to(environment)} {path.lstat().st_mode}\0".encode())
        if path.is_symlink():
            digest.update(str(path.readlink()).encode())
        elif path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return f"localhost/rollart-harbor:{digest.hexdigest()[:16]}", roots


def _dockerfile(environment: Path) -> str:
    file = environment / "Dockerfile"
    if not file.is_file():
        raise ValueError(f"{environment} has no Dockerfile to build an image from")
    return file.read_text()
