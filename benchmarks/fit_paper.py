"""Fit what the RollArt paper does not state to all of its figures together.

    python benchmarks/fit_paper.py sample --log fit.jsonl --count 60        # simulate small scenarios at random points
    python benchmarks/fit_paper.py solve --log fit.jsonl --best best.json   # fit, and cross-validate over whole tables
    rollart reproduce paper --json > full.json; python benchmarks/fit_paper.py solve --near best.json --full full.json
    python benchmarks/fit_paper.py refine --near best.json --best better.json  # CMA-ES on the simulations themselves
    python benchmarks/fit_paper.py --smoke

The parameters and their priors are in benchmarks/paper_priors.yaml. `sample` draws points from the priors, or around a
point, and simulates every figure there, all points with the same random numbers. `solve` fits a response surface to
each figure (log of the value, quadratic in the logs of the parameters) and minimises the error over all figures plus
the prior with CMA-ES. Cross-validation does so without one table at a time and predicts that table. The small scenarios
have fewer trajectories than those that ship, so effects of the slowest of a batch are smaller. With `--full`, what
`rollart reproduce paper` printed at the point `--near` corrects each figure by a factor; the small scenarios then only
say how figures change from there.
"""

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cma
import numpy as np
import yaml
from numpy.typing import NDArray

from rollart.simulator import paper

Array = NDArray[np.float64]
PRIORS = Path(__file__).with_name("paper_priors.yaml")
SIGMAS = 3.92  # a 95% interval is that many standard deviations wide
ERROR = 0.12  # of a figure: what the paper's own numbers disagree by
RIDGE = 0.05


class Prior:
    """Parameters as standard normal numbers: 0 is the middle of its range on a log scale."""

    def __init__(self, path: Path = PRIORS) -> None:
        rows: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())
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


def simulate(prior: Prior, point: Array, tables: Sequence[str]) -> list[dict[str, Any]]:
    """Every figure at a point."""
    scenarios = paper.PaperScenarios(paper.FOLDER, lambda name: None, prior.overrides(point), small=True)
    rows: list[dict[str, Any]] = []
    for figure in paper.FIGURES:
        if figure is not paper.production and (not tables or figure.__name__ in tables):
            rows += [
                {"table": figure.__name__, "what": row.what, "published": row.published, "got": row.simulated}
                for row in figure(scenarios)
            ]
    return rows


def sample(arguments: argparse.Namespace) -> dict[str, Any]:
    prior, rng = Prior(), np.random.default_rng(arguments.seed)
    middle = np.zeros(len(prior.names))
    if arguments.near:
        middle = prior.point(json.loads(arguments.near.read_text())["values"])
    done, until = 0, time.monotonic() + 60 * arguments.minutes
    with arguments.log.open("a") as log:
        while done < arguments.count and time.monotonic() < until:
            point = np.clip(middle + arguments.spread * rng.standard_normal(len(middle)), -2.5, 2.5)
            if done == 0 and arguments.near:
                point = middle
            rows = simulate(prior, point, arguments.tables)
            print(json.dumps({"values": prior.values(point), "rows": rows}), file=log, flush=True)
            done += 1
    return {"sampled": done}


def refine(arguments: argparse.Namespace) -> dict[str, Any]:
    """CMA-ES on the simulations themselves, from a point and over the parameters that the tables depend on."""
    prior = Prior()
    near = prior.point(json.loads(arguments.near.read_text())["values"])
    free = [n for n, name in enumerate(prior.names) if not arguments.only or name in arguments.only]
    search = cma.CMAEvolutionStrategy(near[free], arguments.spread, {"verbose": -9, "seed": 1, "bounds": [-2.5, 2.5]})
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
        for each in samples:
            point = prior.point(each["values"])
            for row in each["rows"]:
                key = (row["table"], row["what"])
                published[key] = row["published"]
                if row["got"] > 0:
                    figures[key].append((point, math.log(row["got"])))
        self.keys = [key for key, found in figures.items() if len(found) >= 5]
        self.published = np.log([published[key] for key in self.keys])
        self._near = np.zeros(len(prior.names)) if near is None else near
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
        penalty = RIDGE * close.sum() * np.eye(features.shape[1])
        penalty[0, 0] = 1e-9
        weights = np.linalg.solve(features.T @ (close[:, None] * features) + penalty, features.T @ (close * values))
        noise = math.sqrt(np.average((features @ weights - values) ** 2, weights=close))
        return weights, noise

    def predict(self, point: Array) -> Array:
        predicted: Array = self._weights @ _features((point - self._near)[None, :])[0] + self._correction
        return predicted


def _features(points: Array) -> Array:
    return np.hstack([np.ones((len(points), 1)), points, 0.5 * points**2])


def solve(prior: Prior, surface: Surface, without: str = "", start: Array | None = None) -> Array:
    """The most likely point: figures with a robust loss, since some contradict each other, and the prior."""
    used = np.array([table != without for table, _ in surface.keys])
    shares = _shares(surface.keys)[used]
    first = np.zeros(len(prior.names)) if start is None else start

    def loss(point: Array) -> float:
        error = (surface.predict(point) - surface.published)[used] / ERROR
        return float(np.sum(shares * np.log1p(error**2)) + 0.5 * point @ point)

    options = {"verbose": -9, "seed": 1, "maxfevals": 20000, "bounds": [-2.5, 2.5]}
    found: Array = cma.fmin2(loss, first, 0.3, options)[0]
    return found


def _shares(keys: Sequence[tuple[str, str]]) -> Array:
    return np.array([weight(table, what) for table, what in keys])


def report(arguments: argparse.Namespace) -> dict[str, Any]:
    prior = Prior()
    samples = [json.loads(line) for line in arguments.log.read_text().splitlines()]
    near = prior.point(json.loads(arguments.near.read_text())["values"]) if arguments.near else None
    surface = Surface(prior, samples, near, _reproduced(arguments.full) if arguments.full else None)
    best = solve(prior, surface, start=near)
    fitted = surface.predict(best) - surface.published
    tables = sorted({table for table, _ in surface.keys})
    left_out: dict[str, list[float]] = {}
    for table in tables:
        point = solve(prior, surface, table, start=near)
        errors = surface.predict(point) - surface.published
        left_out[table] = [float(error) for error, key in zip(errors, surface.keys, strict=True) if key[0] == table]
    spread = _posterior(prior, surface, best)
    outside = [error for errors in left_out.values() for error in errors]
    summary = {
        "samples": len(samples),
        "figures": len(surface.keys),
        "within_15": float(np.mean([paper.within(error) for error in fitted])),
        "cross_validated_within_15": float(np.mean([paper.within(error) for error in outside])),
        "by_table": {table: [sum(map(paper.within, errors)), len(errors)] for table, errors in left_out.items()},
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
        arguments.best.write_text(json.dumps(summary, indent=1))
    return summary


def _reproduced(path: Path) -> dict[str, float]:
    """Figures by name, from the JSON of `rollart reproduce paper`."""
    summary = json.loads(path.read_text().strip().splitlines()[-1])
    return {row["what"]: row["simulated"] for row in (*summary["rows"], *summary["seconds"]["rows"])}


def _posterior(prior: Prior, surface: Surface, best: Array) -> dict[str, float]:
    """Standard deviation of each parameter given all figures (Laplace), in those of its prior: 1 is not pinned down."""
    step = 0.05
    slopes = np.array(
        [
            (surface.predict(best + step * unit) - surface.predict(best - step * unit)) / (2 * step)
            for unit in np.eye(len(best))
        ]
    ).T
    precision = np.eye(len(best)) + slopes.T @ (_shares(surface.keys)[:, None] * slopes) / ERROR**2
    deviations = np.sqrt(np.diag(np.linalg.inv(precision)))
    return {name: round(float(sd), 2) for name, sd in zip(prior.names, deviations, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three points of one table, and a fit to them")
    actions = parser.add_subparsers(dest="action")
    sampling, solving, refining = (actions.add_parser(name) for name in ("sample", "solve", "refine"))
    refining.add_argument("--only", nargs="*", default=[], help="only these parameters")
    refining.add_argument("--best", type=Path, required=True, help="write the best point here")
    refining.add_argument("--near", type=Path, required=True, help="start here")
    for each in (sampling, refining):
        each.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
        each.add_argument("--spread", type=float, default=0.5, help="in standard deviations of the priors")
        each.add_argument("--tables", nargs="*", default=[], help="only these functions of rollart.simulator.paper")
    for each in (sampling, solving):
        each.add_argument("--log", type=Path, default=Path("fit.jsonl"), help="points and their figures, one a line")
        each.add_argument("--near", type=Path, help="a result of solve: sample or fit around it")
    sampling.add_argument("--count", type=int, default=60)
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
