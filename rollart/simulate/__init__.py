"""The simulator: the control plane of real runs on a virtual clock, against modelled engines, environments, rewards,
trainer and weight transfers.

    from rollart.simulate.scenario import load
    from rollart.simulate.simulation import simulate

    scenario = load(Path("scenario.yaml"), ["rollout.alpha=2"])   # a `Scenario`, which is a `RunFile` and more
    result = simulate(scenario)                                   # a `Result`; the same seed gives the same
    result = simulate(scenario, folder=Path("runs/sim-1"), seed=3)  # leaves events.jsonl, as a real run does

| module | what |
|---|---|
| `scenario` | the scenario file: `Scenario`, `Simulate`, `Workload`; `load(path, overrides, workload)` |
| `spread` | distributions: `draw_of(spread)(u)`, `mean_of(spread)` |
| `constants` | every constant of the models, with its source |
| `cost` | seconds of forward passes in closed form: a roofline, or a measured `Pace` |
| `engine` | continuous batching, prefix cache, KV capacity and preemption, weight swaps |
| `environments`, `services`, `weights` | the other modelled services |
| `simulation` | `simulate`: builds the services, runs the real scheduler, router and pipeline |
| `tally`, `result` | events folded into a `Result`; `interval` over several seeds |
| `clock` | the virtual-time event loop |
| `contention` | engines and trainer that share the cores of one machine |
| `measured`, `fit`, `calibration` | from the log of a real run to a scenario: `calibrate(folder)` |
| `plans`, `estimate`, `planner`, `reasons` | what hardware to buy and how to use it: `search(scenario, budget)` |
| `plots` | pictures of fits and plans |
| `modelled` | simple services for tests and for the benchmark of the control plane |

`scenario.model_copy(update=...)` makes variants. A `workload.yaml` has keys of the `simulate` section and is laid
over it.
"""
