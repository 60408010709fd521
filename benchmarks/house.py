"""How well the package is kept: floors, names and sizes, computed from the source.

Last line: `room_cycles`, `upward_imports`, `loose_modules`, `duplicate_names` (all should be 0), and the median, 95th
percentile and maximum of lines per file and per function. `--list` names every offender.
"""

import argparse
import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median, quantiles

PACKAGE = Path(__file__).parents[1] / "rollart"
# A room may import the rooms of lower floors, and rooms of its own floor as long as that makes no cycle.
FLOORS = (
    ("core",),
    ("hardware", "sandbox", "weights", "observe"),
    ("config",),
    ("launch", "rollout"),
    ("workers", "models"),
    ("placement", "engines", "training", "gateway", "envs", "rewards", "simulator"),
    ("agents", "warmup", "play", "players", "robots"),
    ("fleet",),
    ("app",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LOOSE = {"rollart", "rollart.__main__"}  # what may stand at the root


def modules() -> dict[str, ast.Module]:
    return {_name(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def edges(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str]]:
    """Every import of one module of the package by another, those inside functions included."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from ((name, alias.name) for alias in node.names if alias.name in trees)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module in trees:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield name, inner if inner in trees else node.module


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def room_edges(trees: Mapping[str, ast.Module]) -> dict[tuple[str, str], list[str]]:
    """Room to room, with the modules that do it. The root's public API stands above all rooms and is left out."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for importer, imported in edges(trees):
        ends = room(importer), room(imported)
        if importer not in LOOSE and ends[1] and ends[0] != ends[1]:
            found[ends].append(f"{importer} imports {imported}")
    return dict(found)


def upward_imports(trees: Mapping[str, ast.Module]) -> list[str]:
    return [
        line
        for (low, high), lines in room_edges(trees).items()
        if FLOOR.get(low, -1) < FLOOR.get(high, len(FLOORS))
        for line in lines
    ]


def room_cycles(trees: Mapping[str, ast.Module]) -> list[str]:
    """One line for each set of rooms that can all reach each other, with an edge of it."""
    reached: dict[str, set[str]] = defaultdict(set)
    direct = room_edges(trees)
    for low, high in direct:
        reached[low].add(high)
    for middle in list(reached):
        for start in list(reached):
            if middle in reached[start]:
                reached[start] |= reached[middle]
    cycles = {frozenset(other for other in reached[one] if one in reached.get(other, ())) for one in reached}
    return [
        f"{', '.join(sorted(cycle))}: " + next(direct[edge][0] for edge in direct if set(edge) <= cycle)
        for cycle in cycles
        if cycle
    ]


def loose_modules(trees: Mapping[str, ast.Module]) -> list[str]:
    rooms = set(FLOOR) | {""}
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    loose = [name for name in trees if name.count(".") == 1 and name not in packages | LOOSE and name != "rollart"]
    return [*loose, *(f"{name} is on no floor" for name in packages if room(name) not in rooms)]


def duplicate_names(trees: Mapping[str, ast.Module]) -> list[str]:
    """Public classes that share a name, except implementations of a protocol of that name."""
    homes: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append((module, any("Protocol" in ast.unparse(base) for base in node.bases)))
    return [
        f"{name}: {', '.join(module for module, _ in found)}"
        for name, found in sorted(homes.items())
        if sum(not protocol for _, protocol in found) > 1 or sum(protocol for _, protocol in found) > 1
    ]


def functions(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    return {
        f"{module}.{node.name}:{node.lineno}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def files() -> dict[str, int]:
    return {str(path.relative_to(PACKAGE.parent)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="name every offender, and the ten largest of each kind")
    parser.add_argument("--smoke", action="store_true", help="the same: this takes two seconds")
    arguments = parser.parse_args()
    trees = modules()
    offenders = {
        "room_cycles": room_cycles(trees),
        "upward_imports": upward_imports(trees),
        "loose_modules": loose_modules(trees),
        "duplicate_names": duplicate_names(trees),
    }
    sizes = {"file": files(), "function": functions(trees)}
    if arguments.list:
        for kind, lines in offenders.items():
            print(*(f"{kind}: {line}" for line in lines), sep="\n")
        for kind, counts in sizes.items():
            largest = sorted(counts.items(), key=lambda item: -item[1])[:10]
            print(*(f"{kind}: {lines} lines, {name}" for name, lines in largest), sep="\n")
    report: dict[str, float] = {kind: len(lines) for kind, lines in offenders.items()}
    for kind, counts in sizes.items():
        written = [lines for lines in counts.values() if lines]
        report[f"{kind}_median"] = median(written)
        report[f"{kind}_p95"] = quantiles(written, n=20)[-1]
        report[f"{kind}_max"] = max(written)
    report["files"] = len(sizes["file"])
    report["lines"] = sum(sizes["file"].values())
    print(json.dumps(report))


if __name__ == "__main__":
    main()
