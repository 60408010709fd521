"""The simulator: the control plane of real runs on a virtual clock, against simulated engines, environments, rewards,
trainer and weight transfers.

    from rollart.simulator.scenario import load
    from rollart.simulator.simulation import simulate

    scenario = load(Path("scenario.yaml"), ["rollout.alpha=2"])  # a `RunFile` with a `simulate` section
    result = simulate(scenario)  # a `SimulationResult`; the same seed gives the same
    result = simulate(scenario, folder=Path("runs/sim-1"), seed=3)  # writes an event log, as a real run does

| module | what |
|---|---|
| `scenario`, `distributions` | the scenario file: `Scenario`, `Workload`, `load(path, overrides, workload)` |
| `constants` | every constant of the models, with its source |
| `engine`, `decoding`, `pass_cost` | continuous batching, KV capacity, preemption and weight swaps, in closed form |
| `environments`, `services`, `weight_transfer` | the other simulated services |
| `simulation` | `simulate`: builds the services and runs the real scheduler, router and training loop on them |
| `clock` | the virtual-time event loop |
| `result`, `report`, `sweep` | from events to a `SimulationResult`, to tables and JSON |
| `measurements`, `fit`, `calibration` | from the log of a real run to a scenario: `calibrate(folder)` |
| `plans`, `planner` | which hardware to buy and how to use it: `search(scenario)` |
| `paper` | the figures of the RollArt paper, published and simulated |
| `plots` | pictures of fits and plans |
"""
