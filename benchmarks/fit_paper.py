"""Fit what the RollArt paper does not state to all of its figures together.

    python -m benchmarks.fit_paper sample --log fit.jsonl --count 60        # figures at random points
    python -m benchmarks.fit_paper sample --log fit.jsonl --each --near shipped   # one at a time, around a point
    python -m benchmarks.fit_paper solve --log fit.jsonl --best best.json   # fit, and cross-validate over whole tables
    rollart reproduce paper --json > full.json; python -m benchmarks.fit_paper solve --near best.json --full full.json
    python -m benchmarks.fit_paper refine --near best.json --best better.json  # CMA-ES on the figures themselves
    python -m benchmarks.fit_paper --smoke

The parameters and their priors are in benchmarks/paper_priors.yaml. `sample` draws points from the priors, or around a
point, and computes every figure there, all points with the same random numbers, by the coarse copy of the simulator in
benchmarks/surrogate.py: two seconds a point. `solve` fits a response surface to each figure (log of the value,
quadratic in the logs of the parameters) and minimises the error over all figures plus the prior by Gauss-Newton steps.
Cross-validation does so without one table at a time and predicts that table. With `--full`, what `rollart reproduce
paper` printed at the point `--near` corrects each figure by a factor; the coarse simulations then only say how figures
change from there. `--scenarios examples/paper/prompts` does all of it for the other reading of the paper.
"""

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import cma
import numpy as np
import yaml
from numpy.typing import NDArray

from benchmarks import surrogate
from benchmarks.surrogate import SurrogateResult
from rollart.simulator import paper
from rollart.simulator.constants import Constants
from rollart.simulator.scenario import Scenario

Array = NDArray[np.float64]
PRIORS = Path(__file__).with_name("paper_priors.yaml")
SHIPPED = Path("shipped")
SIGMAS = 3.92  # a 95% interval is that many standard deviations wide
BOUND = 2.5  # of parameters, in standard deviations of their priors
ERROR = 0.12  # of a figure: what the paper's own numbers disagree by
RIDGE = 0.1


class Prior:
    """Parameters as standard normal numbers: 0 is the middle of its range on a log scale."""

    def __init__(self, scenarios: Path = paper.FOLDER) -> None:
        self.scenarios = scenarios
        rows: dict[str, dict[str, Any]] = yaml.safe_load(PRIORS.read_text())
        self.names = list(rows)
        self._keys = [rows[name]["keys"] for name in self.names]
        low, high = np.log(np.array([rows[name]["range"] for name in self.names], float)).T
        self._mean, self._sd = (low + high) / 2, (high - low) / SIGMAS

    def values(self, point: Array) -> dict[str, float]:
        return dict(zip(self.names, np.exp(self._mean + self._sd * point).tolist(), strict=True))

    def point(self, values: Mapping[str, float]) -> Array:
        found: Array = (np.log([values[name] for name in self.names]) - self._mean) / self._sd
        return found

    def overrides(self, point: Array) -> dict[str, float]:
        values = self.values(point)
        return {key: values[name] for name, keys in zip(self.names, self._keys, strict=True) for key in keys}

    def shipped(self) -> dict[str, float]:
        """The values that the scenarios have."""
        trees = [
            yaml.safe_load(path.read_text()) for path in self.scenarios.glob("*.yaml") if path.stem != "production"
        ]
        defaults = {"simulate": {"constants": Constants().model_dump()}}
        found = ([_lookup(tree, keys[0]) for tree in (*trees, defaults)] for keys in self._keys)
        return {name: next(filter(None, each)) for name, each in zip(self.names, found, strict=True)}

    def near(self, path: Path) -> Array:
        """The point of a result, or of the scenarios as they are if the path is `shipped`."""
        return self.point(self.shipped() if path == SHIPPED else json.loads(path.read_text())["values"])


def _lookup(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


_OF_A_STORE = ("push_efficiency", "pull_efficiency", "pull_exposed")
_results: dict[str, SurrogateResult] = {}


def _simulated(scenario: Scenario) -> SurrogateResult:
    """As simulated before, if only constants differ that do not matter to the scenario."""
    section = scenario.simulate
    unused = {"collective_efficiency"} if section.weights.method == "store" else set(_OF_A_STORE)
    unused |= set() if section.colocated else {"switch_rate"}
    unused |= {"train_efficiency", "train_fixed_s", "switch_rate", "collective_efficiency"} if section.train else set()
    if all(pool.tensor_parallel == 1 for pool in scenario.pools_of("generate").values()):
        unused.add("all_reduce_s")
    key = scenario.model_dump_json(exclude={"simulate": {"constants": unused}})
    if key not in _results:
        _results[key] = surrogate.simulate(scenario)
    return _results[key]


def simulate(prior: Prior, point: Array, tables: Sequence[str]) -> list[dict[str, Any]]:
    """Every figure at a point. What a parameter does not change is not simulated again."""
    scenarios = paper.PaperScenarios(prior.scenarios, lambda name: None, prior.overrides(point), simulate=_simulated)
    rows: list[dict[str, Any]] = []
    for figure in paper.FIGURES:
        if figure is not paper.production and (not tables or figure.__name__ in tables):
            rows += [{"table": figure.__name__, "got": row.simulated} | asdict(row) for row in figure(scenarios)]
    return rows


def _design(arguments: argparse.Namespace, prior: Prior) -> Iterator[Array]:
    """The points to sample: at random, or the middle and one parameter at a time, up and down."""
    middle = prior.near(arguments.near) if arguments.near else np.zeros(len(prior.names))
    if arguments.near or arguments.each:
        yield middle
    if arguments.each:
        toward = np.where(middle > 0, -1, 1)  # the middle of the prior
        varied = [n for n, name in enumerate(prior.names) if not arguments.only or name in arguments.only]
        units = arguments.spread * np.eye(len(middle))[varied]
        yield from (middle + sign * unit for sign in (toward, -toward) for unit in units)
        return
    rng = np.random.default_rng(arguments.seed)
    while True:
        yield np.clip(middle + arguments.spread * rng.standard_normal(len(middle)), -BOUND, BOUND)


def sample(arguments: argparse.Namespace) -> dict[str, Any]:
    prior = Prior(arguments.scenarios)
    done, until = 0, time.monotonic() + 60 * arguments.minutes
    first: list[dict[str, Any]] = []
    with arguments.log.open("a") as log:
        for point in islice(_design(arguments, prior), arguments.skip, arguments.count):
            if time.monotonic() > until:
                break
            rows = simulate(prior, point, arguments.tables)
            print(json.dumps({"values": prior.values(point), "rows": rows}), file=log, flush=True)
            first, done = first or rows, done + 1
    compared = [math.log(row["got"] / row["published"]) for row in first if not row["absolute"]]
    return {"sampled": done, "first_within_15": sum(map(paper.within, compared)), "figures": len(compared)}


def refine(arguments: argparse.Namespace) -> dict[str, Any]:
    """CMA-ES on the simulations themselves, from a point and over the parameters that the tables depend on."""
    prior = Prior(arguments.scenarios)
    near = prior.near(arguments.near)
    free = [n for n, name in enumerate(prior.names) if not arguments.only or name in arguments.only]
    search = cma.CMAEvolutionStrategy(
        near[free], arguments.spread, {"verbose": -9, "seed": 1, "bounds": [-BOUND, BOUND]}
    )
    until = time.monotonic() + 60 * arguments.minutes
    best, least, evaluations = near, math.inf, 0
    while not search.stop() and time.monotonic() < until:
        points, losses = search.ask(), []
        for each in points:
            point = near.copy()
            point[free] = each
            rows = simulate(prior, point, arguments.tables)
            losses.append(_loss(point, rows))
            evaluations += 1
            if losses[-1] < least:
                best, least = point, losses[-1]
                kept = {"loss": least, "evaluations": evaluations, "values": prior.values(best), "rows": rows}
                arguments.best.write_text(json.dumps(kept, indent=1))
        search.tell(points, losses)
    return {"loss": least, "evaluations": evaluations, "values": prior.values(best)}


def _loss(point: Array, rows: Sequence[Mapping[str, Any]]) -> float:
    errors = np.log([max(1e-9, row["got"]) / row["published"] for row in rows]) / ERROR
    weights = np.array([weight(row["table"], row["what"]) for row in rows])
    return float(np.sum(weights * np.log1p(errors**2)) + 0.5 * point @ point)


def weight(table: str, what: str) -> float:
    """Comparisons count once. Seconds of the same-cost table count less: each comparison is made of two of them, and
    those of FrozenLake grow faster than its batch."""
    if table == "same_cost" and what.endswith(", s"):
        return 0.1 if what.startswith("FrozenLake") else 0.4
    return 1.0


class Surface:
    """Predicts the logs of figures at points; `table` and `published` describe the figures."""

    def __init__(
        self,
        prior: Prior,
        samples: Sequence[Mapping[str, Any]],
        near: Array | None,
        full: Mapping[str, float] | None = None,
    ) -> None:
        figures: dict[tuple[str, str], list[tuple[Array, float]]] = defaultdict(list)
        published: dict[tuple[str, str], float] = {}
        self.absolute: set[tuple[str, str]] = set()
        for each in samples:
            point = prior.point(each["values"])
            for row in each["rows"]:
                key = (row["table"], row["what"])
                published[key] = row["published"]
                if row["absolute"]:
                    self.absolute.add(key)
                if row["got"] > 0:
                    figures[key].append((point, math.log(row["got"])))
        self.keys = [key for key, found in figures.items() if len(found) >= 5]
        self.published = np.log([published[key] for key in self.keys])
        points = np.array([prior.point(each["values"]) for each in samples])
        self._near = np.zeros(len(prior.names)) if near is None else near
        self.varied = np.ptp(points, axis=0) > 1e-6
        fits = [self._fit(figures[key]) for key in self.keys]
        self._weights = np.array([weights for weights, _ in fits])
        self.noise = np.array([noise for _, noise in fits])
        self._correction: Array = np.zeros(len(self.keys))
        at_near = self.predict(self._near)
        for index, (_, what) in enumerate(self.keys):
            if full and what in full:
                self._correction[index] = math.log(full[what]) - at_near[index]

    def _fit(self, found: list[tuple[Array, float]]) -> tuple[Array, float]:
        points = np.array([point for point, _ in found]) - self._near
        values = np.array([value for _, value in found])
        close = np.exp(-0.5 * (points**2).mean(axis=1) / 0.5**2) if np.any(self._near) else np.ones(len(points))
        features = _features(points)
        squares = features.T @ (close[:, None] * features)
        penalty = RIDGE * np.diag(squares)[1:].mean() * np.eye(features.shape[1])
        penalty[0, 0] = 1e-9
        weights = np.linalg.solve(squares + penalty, features.T @ (close * values))
        noise = math.sqrt(np.average((features @ weights - values) ** 2, weights=close))
        return weights, noise

    def predict(self, point: Array) -> Array:
        predicted: Array = self._weights @ _features((point - self._near)[None, :])[0] + self._correction
        return predicted

    def slopes(self, point: Array) -> Array:
        """Of each figure's log by each parameter."""
        linear, quadratic = np.hsplit(self._weights[:, 1:], 2)
        found: Array = linear + quadratic * (point - self._near)
        return found


def _features(points: Array) -> Array:
    return np.hstack([np.ones((len(points), 1)), points, 0.5 * points**2])


def solve(prior: Prior, surface: Surface, without: str = "", start: Array | None = None) -> Array:
    """The most likely point: figures with a robust loss, since some contradict each other, and the prior."""
    used = np.array([fold(*key) != without for key in surface.keys])
    shares = _shares(surface.keys)[used]
    point = np.zeros(len(prior.names)) if start is None else start.copy()
    free = surface.varied  # of the others, the samples say nothing

    def loss(values: Array) -> float:
        point[free] = values
        error = (surface.predict(point) - surface.published)[used] / ERROR
        return float(np.sum(shares * np.log1p(error**2)) + 0.5 * values @ values)

    def newton_step(values: Array) -> Array:
        """Of least squares in which a figure counts less the farther it is off."""
        point[free] = values
        error = (surface.predict(point) - surface.published)[used] / ERROR
        slopes = surface.slopes(point)[used][:, free] / ERROR
        weights = 2 * shares / (1 + error**2)
        curvature = slopes.T @ (weights[:, None] * slopes) + np.eye(len(values))
        step: Array = -np.linalg.solve(curvature, slopes.T @ (weights * error) + values)
        return step

    starts = (point[free].copy(), np.zeros(int(np.sum(free))))
    point[free] = min((_descend(loss, newton_step, each) for each in starts), key=loss)
    return point


def _descend(loss: Callable[[Array], float], newton_step: Callable[[Array], Array], values: Array) -> Array:
    """Steps as long as the loss falls, each halved until it does."""
    least = loss(values)
    for _ in range(200):
        step = newton_step(values)
        tries = (np.clip(values + step / 2**halved, -BOUND, BOUND) for halved in range(12))
        better = next(((found, each) for each in tries if (found := loss(each)) < least - 1e-9), None)
        if better is None:
            break
        least, values = better
    return values


def fold(table: str, what: str) -> str:
    """What is left out together: a table. No other says how fast weights move: of theirs, one model at a time."""
    return f"{table}, {what.split()[0]}" if table == "weight_transfer" else table


def _shares(keys: Sequence[tuple[str, str]]) -> Array:
    return np.array([weight(table, what) for table, what in keys])


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    prior = Prior(arguments.scenarios)
    samples = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    near = prior.near(arguments.near) if arguments.near else None
    surface = Surface(prior, samples, near, _reproduced(arguments.full) if arguments.full else None)
    best = solve(prior, surface, start=near)
    fitted = surface.predict(best) - surface.published
    compared = np.array([key not in surface.absolute for key in surface.keys])
    outside = np.zeros(len(surface.keys))
    by_fold: dict[str, list[int]] = {}
    for left_out in sorted({fold(*key) for key in surface.keys}):
        errors = surface.predict(solve(prior, surface, left_out, start=near)) - surface.published
        mine = np.array([fold(*key) == left_out for key in surface.keys])
        outside[mine] = errors[mine]
        close = [paper.within(error) for error in errors[mine & compared]]
        by_fold[left_out] = [sum(close), len(close)]
    spread = _posterior(prior, surface, best)
    summary = {
        "command": f"python -m benchmarks.fit_paper {' '.join(sys.argv[1:])}",
        "samples": len(samples),
        "figures": int(np.sum(compared)),
        "fitted_within_15": _share_within(fitted[compared]),
        "cross_validated_within_15": _share_within(outside[compared]),
        "cross_validated_median_error": float(np.median(np.abs(np.exp(outside[compared]) - 1))),
        "seconds": {"fitted_within_15": _share_within(fitted[~compared])}
        | {"cross_validated_within_15": _share_within(outside[~compared])},
        "by_table": by_fold,
        "not_pinned_down": [name for name, sd in spread.items() if sd > 0.7],
        "posterior_sd_in_prior_sds": spread,
        "values": prior.values(best),
        "misses": {
            f"{key[0]}: {key[1]}": [round(math.exp(value), 3), round(math.exp(value + error), 3)]
            for key, value, error in zip(surface.keys, surface.published, fitted, strict=True)
            if not paper.within(error)
        },
    }
    if arguments.best:
        arguments.best.write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _share_within(log_errors: Array) -> float:
    return round(float(np.mean([paper.within(error) for error in log_errors])), 3)


def _reproduced(path: Path) -> dict[str, float]:
    """Figures by name, from the JSON of `rollart reproduce paper`."""
    summary = json.loads(path.read_text().strip().splitlines()[-1])
    return {row["what"]: row["simulated"] for row in (*summary["rows"], *summary["seconds"]["rows"])}


def _posterior(prior: Prior, surface: Surface, best: Array) -> dict[str, float]:
    """Standard deviation of each parameter given all figures (Laplace), in those of its prior: 1 is not pinned down."""
    slopes = surface.slopes(best)
    precision = np.eye(len(best)) + slopes.T @ (_shares(surface.keys)[:, None] * slopes) / ERROR**2
    deviations = np.sqrt(np.diag(np.linalg.inv(precision)))
    return {name: round(float(sd), 2) for name, sd in zip(prior.names, deviations, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three points of one table, and a fit to them")
    actions = parser.add_subparsers(dest="action")
    sampling, solving, refining = (actions.add_parser(name) for name in ("sample", "solve", "refine"))
    refining.add_argument("--best", type=Path, required=True, help="write the best point here")
    refining.add_argument("--near", type=Path, required=True, help="start here")
    for each in (sampling, solving, refining):
        each.add_argument("--scenarios", type=Path, default=paper.FOLDER, help="a folder of scenarios of the paper")
    for each in (sampling, refining):
        each.add_argument("--only", nargs="*", default=[], help="only these parameters; of `sample`, with --each")
        each.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
        each.add_argument("--spread", type=float, default=0.5, help="in standard deviations of the priors")
        each.add_argument("--tables", nargs="*", default=[], help="only these functions of rollart.simulator.paper")
    for each in (sampling, solving):
        each.add_argument("--log", type=Path, default=Path("fit.jsonl"), help="points and their figures, one a line")
        each.add_argument("--near", type=Path, help="a result of solve, or `shipped`: sample or fit around it")
    sampling.add_argument("--each", action="store_true", help="one parameter at a time instead of all at random")
    sampling.add_argument("--count", type=int, default=60)
    sampling.add_argument("--skip", type=int, default=0, help="points that an earlier call has sampled")
    sampling.add_argument("--seed", type=int, default=0)
    solving.add_argument("--best", type=Path, help="write the result here")
    solving.add_argument("--full", type=Path, help="the JSON of `rollart reproduce paper` with the values of --near")
    arguments = parser.parse_args()
    if arguments.smoke:
        prior = Prior()
        rows = [
            {"values": prior.values(point), "rows": simulate(prior, point, ["step_breakdown"])}
            for point in np.random.default_rng(0).standard_normal((5, len(prior.names)))
        ]
        surface = Surface(prior, rows, None)
        print(json.dumps({"figures": len(surface.keys), "values": prior.values(solve(prior, surface))}))
        return
    print(json.dumps({"sample": sample, "solve": report, "refine": refine}[arguments.action](arguments)))


if __name__ == "__main__":
    main()
