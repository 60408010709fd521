"""Explains a plan: what differs from the scenario's own, and what limits its steps."""

from rollart.simulate.planner import PlanResult, PlanSearch
from rollart.simulate.plans import ClusterPlan

_BUSY = 0.85
_STAGES = {
    "claim": "waiting for a process",
    "reset": "reset",
    "queue": "waiting for an engine",
    "generate": "generation",
    "step": "environment steps",
    "score": "reward",
}
_SAME = 0.02


def reason(tried: PlanResult, given: PlanResult | None) -> str:
    """One sentence or two."""
    parts = [_limit(tried)]
    if given is not None and tried is not given:
        if changes := differences(tried.plan, given.plan):
            parts.insert(0, ", ".join(changes))
        parts.append(_gain(tried, given))
    return "; ".join(parts)


def differences(plan: ClusterPlan, given: ClusterPlan) -> list[str]:
    """What differs from the plan as given."""
    found = []
    if moved := plan.trainers - given.trainers:
        found.append(f"{abs(moved)} {plan.trainer} {'more' if moved > 0 else 'fewer'} for training")
    ours, theirs = _generation(plan), _generation(given)
    more = {device: ours.get(device, 0) - theirs.get(device, 0) for device in sorted({*ours, *theirs})}
    found += [f"{abs(n)} {kind} {'more' if n > 0 else 'fewer'} for generation" for kind, n in more.items() if n]
    if plan.alpha != given.alpha:
        found.append(f"alpha {plan.alpha}, so trained data is up to {plan.alpha} versions old")
    if plan.extra_members != given.extra_members:
        found.append(f"{plan.extra_members} extra members a group")
    if plan.group_size != given.group_size:
        found.append(f"{plan.batch_groups} groups of {plan.group_size}")
    if plan.processes != given.processes:
        found.append(f"{plan.processes} processes a task")
    if plan.disaggregate != given.disaggregate:
        pair = f"prefill on {plan.engines[0].device}, decode on {plan.engines[1].device}" if plan.disaggregate else ""
        found.append(pair or "no pairs of prefill and decode")
    return found


def explanation(search: PlanSearch) -> str:
    """The fastest plan, in full sentences."""
    best, given = search.fastest, search.given
    pools = ", ".join(f"{name} {use.busy:.0%}" for name, use in best.result.pools.items())
    lines = [
        f"The fastest within {search.budget:g}: {best.plan.split}; alpha {best.plan.alpha}, {best.plan.extra_members} "
        f"extra members, {best.plan.batch_groups} groups of {best.plan.group_size}, "
        f"{best.plan.processes} processes a task.",
        f"It takes {best.step_s:.1f} s per step for {best.price:.4g} per hour: the trainer is busy "
        f"{best.result.trainer_use:.0%} of the time, engines: {pools}. {_limit(best).capitalize()}.",
    ]
    if given is not None and best is not given:
        lines.append(
            f"The plan as given takes {given.step_s:.1f} s for {given.price:.4g}: there, {_limit(given)}. "
            f"The difference: {', '.join(differences(best.plan, given.plan)) or 'none'}."
        )
        if best.plan.alpha > given.plan.alpha or best.plan.group_size != given.plan.group_size:
            lines.append("Staleness and group size also change what a step learns, which is not simulated.")
    elif given is not None:
        lines.append("It is the plan as given.")
    return "\n".join(lines)


def _generation(plan: ClusterPlan) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in plan.engines:
        counts[each.device] = counts.get(each.device, 0) + each.devices
    return counts


def _limit(tried: PlanResult) -> str:
    """What limits its step time."""
    result = tried.result
    if result.trainer_use >= _BUSY:
        return f"training sets the pace ({result.trainer_use:.0%} busy)"
    busiest = max(result.pools.items(), key=lambda item: item[1].busy)
    if busiest[1].busy >= _BUSY:
        return f"generation sets the pace ({busiest[0]} {busiest[1].busy:.0%} busy, trainer {result.trainer_use:.0%})"
    stages = {_STAGES[name]: seconds for name, seconds in result.trajectory.items()}
    stages["weight transfer"] = tried.transfer_s
    longest = sorted((name for name in stages if stages[name] > 0), key=lambda name: -stages[name])[:2]
    stage_times = " and ".join(f"{name} {stages[name]:.0f} s" for name in longest)
    waits = f"the trainer waits {min(1.0, result.wait_s / result.step_s):.0%} of a step for the slowest of its batch"
    return f"waiting, not devices, sets the pace: {waits}; on average, most of it {stage_times}"


def _gain(tried: PlanResult, given: PlanResult) -> str:
    factor, price = given.step_s / tried.step_s, tried.price / given.price - 1
    speed = f"{factor:.2f}x as fast" if abs(factor - 1) > _SAME else "as fast"
    if abs(price) <= _SAME:
        return f"{speed} for the same price"
    return f"{speed} for {abs(price):.0%} {'more' if price > 0 else 'less'}"
