"""The runs below a folder, by name. A request names a run; only names that are listed here have a folder, so no
request reaches a path of its own choice."""

import json
import os
import threading
from pathlib import Path
from typing import Any

from rollart.app.dashboard.run_index import RunIndex
from rollart.core import run_folder
from rollart.core.errors import RollartError

_DEPTH = 3
_MAX_PLAN_BYTES = 8 << 20


class Runs:
    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise RollartError(f"{root} is not a folder; give the folder of your runs, or that of one run")
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._folders: dict[str, Path] = {}
        self._indices: dict[str, RunIndex] = {}

    def names(self) -> list[str]:
        """The newest first."""
        with self._lock:
            self._folders = dict(self._scan())
            return list(self._folders)

    def _scan(self) -> list[tuple[str, Path]]:
        if _is_run(self.root):
            return [(self.root.name, self.root)]
        found = []
        for base, folders, _ in os.walk(self.root):  # does not follow links, which may lead outside
            path = Path(base)
            depth = len(path.relative_to(self.root).parts)
            if depth and _is_run(path):
                found.append((path.relative_to(self.root).as_posix(), path))
                folders.clear()
            elif depth >= _DEPTH:
                folders.clear()
        return sorted(found, key=lambda run: _changed(run[1]), reverse=True)

    def get(self, name: str) -> RunIndex:
        """Raises KeyError for a name that is not listed."""
        if name not in self._folders and name not in self.names():
            raise KeyError(name)
        with self._lock:
            if name not in self._indices:
                self._indices[name] = RunIndex(self._folders[name])
            index = self._indices[name]
        index.watch()
        return index

    def listed(self) -> list[dict[str, Any]]:
        """A line about each run, cheap: from its index if somebody looked at it, else from its summary."""
        return [self._line(name) for name in self.names()]

    def _line(self, name: str) -> dict[str, Any]:
        folder = self._folders[name]
        line: dict[str, Any] = {"run": name, "changed": _changed(folder)}
        index = self._indices.get(name)
        if index is not None and index.shown.run is not None:
            state = index.state()
            return line | {"phase": state["phase"], "step": state["step"], "steps": index.shown.run.steps}
        summary = _json(folder / "summary.json")
        running, killed = run_folder.has_controller(folder), run_folder.was_killed(folder)  # since that summary
        phase = "running" if running else "interrupted" if killed else summary.get("phase")
        return line | {"phase": phase, "steps": summary.get("steps"), "step": summary.get("version")}

    def plans(self) -> list[dict[str, Any]]:
        """JSON files of `rollart simulate --sweep` and `rollart plan`, in the folder of the runs."""
        found = []
        for path in sorted(self.root.glob("*.json"), key=_changed, reverse=True)[:50]:
            content = _json(path)
            kind = "sweep" if "sweep" in content else "plan" if "front" in content else ""
            if kind:
                found.append({"file": path.name, "kind": kind, "content": content})
        return found


def _is_run(path: Path) -> bool:
    try:
        run_folder.events_of(path)
    except RollartError:
        return False
    return True


def _changed(path: Path) -> float:
    try:
        files = run_folder.events_of(path).iterdir() if path.is_dir() else [path]
        return max(file.stat().st_mtime for file in files)
    except (OSError, RollartError):
        return 0.0


def _json(path: Path) -> dict[str, Any]:
    """The last line or the whole of a file; empty if it is missing or something else."""
    try:
        if path.is_symlink() or path.stat().st_size > _MAX_PLAN_BYTES:
            return {}
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = json.loads(text.strip().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}
