"""Builds a task's Dockerfile in a sandbox, as far as possible: folders, files, variables and commands.

The system is this machine's own /usr, whatever FROM says, and there is no root: a RUN that installs packages fails, and
the task with it, unless RUN is skipped because they are installed already. In a container (`container.py`) the whole
Dockerfile was built before.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollart.sandbox.archive import archive_paths
from rollart.sandbox.bubblewrap import VARIABLES, WORK, ExtraMounts
from rollart.sandbox.shell import Sandbox

WORKDIR = "/app"
CONVENTION = ("/agent", "/app", "/logs", "/solution", "/tests")
SYSTEM = {"/", "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/proc", "/dev", "/tmp", "/sys", "/task"}
IGNORED = {"FROM", "CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "USER", "HEALTHCHECK", "VOLUME", "STOPSIGNAL", "MAINTAINER"}
VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
ROOT = re.compile(r"(?<![\w./\-}])/[A-Za-z]\w*")  # the first part of an absolute path
BUILD_S = 600.0
SEED = "/rollart-seed"  # the folders of a container's image that a trial may write to


@dataclass(frozen=True)
class BuildStep:
    """Files to copy into the sandbox, or a command to run after `enter`."""

    copies: tuple[tuple[Path, str], ...] = ()
    command: str = ""
    enter: str = ""


@dataclass(frozen=True)
class Image:
    workdir: str
    variables: dict[str, str]
    steps: tuple[BuildStep, ...]
    roots: tuple[str, ...] = CONVENTION
    container: str | None = None  # the name of a built OCI image, in which there are no steps left

    @property
    def mounts(self) -> ExtraMounts:
        """The folders of its root lie in the work folder, which is all that is carried to the verifier."""
        return ExtraMounts(links=() if self.container else tuple((root, root[1:]) for root in self.roots))

    def build(self, sandbox: Sandbox) -> None:
        """Raises ValueError if a command fails."""
        if self.container:
            copied = sandbox.run(f"cp -a {SEED}/* {WORK}/", BUILD_S)
            if copied.exit_code != 0:
                raise ValueError(
                    f"the image's folders do not fit; raise `limits: {{disk: MB}}`: {copied.output[-300:]}"
                )
            sandbox.run(self.enter)
            return
        folders = " ".join(shlex.quote(folder) for _, folder in self.mounts.links)
        sandbox.run(f"mkdir -p {folders}")
        for step in self.steps:
            if step.copies and not sandbox.unpack(archive_paths((path, target[1:]) for path, target in step.copies)):
                raise ValueError("the files of its Dockerfile do not fit into the sandbox; raise `limits: {disk: MB}`")
            if step.command:
                self._run(sandbox, step)
        sandbox.run(self.enter)

    def _run(self, sandbox: Sandbox, step: BuildStep) -> None:
        result = sandbox.run(f"{step.enter} && {{ {step.command}\n}}", BUILD_S)
        if result.exit_code != 0:
            raise ValueError(
                f"`RUN {step.command[:100]}` of its Dockerfile fails in a sandbox, where there is no network and no "
                f"root; if this machine has what it installs, give `skip_run: true`. It wrote: {result.output[-300:]}"
            )

    @property
    def enter(self) -> str:
        """The first command of a shell."""
        return _enter(self.workdir, self.variables)


def image_of(folder: Path, skip_run: bool = False, texts: Sequence[str] = ()) -> Image:
    """With every root folder that the Dockerfile or `texts` mention. Raises ValueError for what a sandbox cannot do."""
    file = folder / "Dockerfile"
    workdir, variables = WORKDIR, dict[str, str]()
    steps: list[BuildStep] = []
    text = file.read_text() if file.is_file() else ""
    for word, rest in _instructions(text):
        rest = rest if word == "RUN" else _expanded(rest, {**VARIABLES, **variables})
        if word == "WORKDIR":
            workdir = _writable(posixpath.join(workdir, rest.strip()), file)
        elif word in ("ENV", "ARG"):
            variables |= _variables(rest)
        elif word in ("COPY", "ADD"):
            steps.append(BuildStep(_copies(rest, folder, workdir, file)))
        elif word == "RUN" and not skip_run:
            steps.append(BuildStep(command=_command(rest), enter=_enter(workdir, variables)))
        elif word not in IGNORED and word != "RUN":
            raise ValueError(f"{file} has {word}, which the sandbox does not support")
    return Image(workdir, variables, tuple(steps), roots_of(text, texts))


def roots_of(text: str, texts: Sequence[str]) -> tuple[str, ...]:
    named = {found[0] for each in (text, *texts) for found in ROOT.finditer(each)}
    return tuple(sorted({*CONVENTION, *named} - SYSTEM))


def _enter(workdir: str, variables: dict[str, str]) -> str:
    folder = shlex.quote(workdir)
    exports = "".join(f" && export {name}={shlex.quote(value)}" for name, value in variables.items())
    return f"mkdir -p {folder} && cd {folder}{exports}"


def _expanded(text: str, variables: dict[str, str]) -> str:
    return VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), text)


def _instructions(text: str) -> list[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\[ \t]*\n", " ", "\n".join(lines))
    return [
        (word.upper(), rest.strip())
        for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines())
        if word
    ]


def _variables(rest: str) -> dict[str, str]:
    parts = shlex.split(rest)
    if parts and "=" not in parts[0]:  # the old form: name, then value
        return {parts[0]: " ".join(parts[1:])} if len(parts) > 1 else {}
    return dict(part.split("=", 1) for part in parts if "=" in part)


def _command(rest: str) -> str:
    if rest.startswith("["):
        return shlex.join(json.loads(rest))
    if "<<" in rest:
        raise ValueError(f"`RUN {rest[:60]}` has a heredoc, which is not supported")
    return rest


def _copies(rest: str, context: Path, workdir: str, file: Path) -> tuple[tuple[Path, str], ...]:
    parts = json.loads(rest) if rest.startswith("[") else shlex.split(rest)
    flags = [part for part in parts if part.startswith("--")]
    if any(flag.startswith("--from") for flag in flags):
        raise ValueError(f"{file} copies from another image, which the sandbox does not have")
    *sources, target = (part for part in parts if part not in flags)
    copies = []
    for source in sources:
        found = sorted(context.glob(source.lstrip("/"))) if source not in (".", "./") else [context]
        inside = context.resolve()
        if not found or any(not path.resolve().is_relative_to(inside) for path in found):  # also through a link
            raise ValueError(f"{file} copies {source}, which is not in {context}")
        for path in found:
            into = target.endswith("/") or target == "." or len(sources) + len(found) > 2
            name = posixpath.join(target, path.name) if into and path.is_file() else target
            copies.append((path, _writable(posixpath.join(workdir, name), file)))
    return tuple(copies)


def _writable(path: str, file: Path) -> str:
    path = posixpath.normpath(path)
    if "/" + path.split("/")[1] in SYSTEM:
        raise ValueError(f"{file} writes to {path}, which is read-only in the sandbox")
    return path
