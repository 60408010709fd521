"""Household tasks with ALFWorld's rules and words, in kitchens generated from the seed.

Not the official benchmark, whose games must be downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import alfworld
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
from textworld.envs import PddlEnv

from rollart.envs.adapters import CommandGame, instance

DATA = Path(alfworld.__file__).parent / "data"
OPENABLE = ("cabinet", "drawer", "fridge", "microwave")
PLACES = ("countertop", "countertop", "cabinet", "cabinet", "drawer", "diningtable", "garbagecan")
FIXED = ("fridge", "microwave", "sinkbasin")  # every kitchen has one of each: they cool, heat and clean
FOOD, DISHES = ("apple", "potato", "tomato", "egg", "bread"), ("mug", "cup", "plate", "bowl")
DONE = {"": "", "clean": "isClean", "hot": "isHot", "cool": "isCool"}


class AlfWorld(CommandGame):
    """1 when the task is done. `tasks` are the kinds to draw from: "" (only put), "clean", "hot" and "cool"."""

    def __init__(
        self,
        tasks: list[str] | None = None,
        objects: int = 6,
        max_actions: int = 30,
        commands: bool = True,
        held_out: bool = False,
    ) -> None:
        self.tasks = tuple(DONE if tasks is None else tasks)
        unknown = [task for task in self.tasks if task not in DONE]
        if unknown or not self.tasks:
            what = f"`tasks` has {unknown[0]!r}" if unknown else "`tasks` is empty"
            raise ValueError(f"{what}; they are {', '.join(map(repr, DONE))}")
        self.objects, self.max_actions, self.commands, self.held_out = objects, max_actions, commands, held_out
        self.infos = textworld.EnvInfos(won=True, admissible_commands=True)
        files = {"pddl_domain": "alfred.pddl", "grammar": "alfred.twl2"}
        self.rules = {name: (DATA / file).read_text() for name, file in files.items()}
        self.actions = 0

    def reset(self, seed: int) -> str:
        self.close()
        rng = random.Random(f"alfworld {instance(seed, self.held_out)}")
        goal, problem = kitchen(rng, self.tasks, self.objects)
        grammar = self.rules["grammar"].replace("UNKNOWN GOAL", goal)
        self.env = AlfredDemangler(PddlEnv(self.infos))
        self.env.load({**self.rules, "grammar": grammar, "pddl_problem": problem})
        self.state = self.env.reset()
        self.actions = 0
        return self._text(self.state.feedback.split("=-", 1)[-1])

    def step(self, action: str) -> dict[str, Any]:
        self.actions += 1
        command = " ".join(action.split())
        if command in self.state.admissible_commands:
            self.state, _, _ = self.env.step(command)
            feedback = self.state.feedback
        else:
            feedback = "Nothing happens."
        won = bool(self.state.won)
        truncated = not won and self.actions >= self.max_actions
        info = {"success": won} if won or truncated else {}
        step = {"messages": self._text(feedback), "reward": float(won), "info": info}
        return {**step, "done": won, "truncated": truncated}


def kitchen(rng: random.Random, tasks: tuple[str, ...], count: int) -> tuple[str, str]:
    """A task in words, and its kitchen as a PDDL problem, which is always solvable."""
    task = rng.choice(tasks)
    target = rng.choice(FOOD if task in ("hot", "cool") else FOOD + DISHES)
    goal = rng.choice(("countertop", "cabinet", "drawer", "diningtable"))
    places = [_Thing(kind, number) for number, kind in enumerate(PLACES + FIXED)]
    things = [_Thing(target, 0), *(_Thing(rng.choice(FOOD + DISHES), 1 + number) for number in range(count - 1))]
    facts = ["(atLocation agent1 loc0)", "(= (total-cost) 0)"]
    for place in places:
        facts += [f"(receptacleAtLocation {place.id} {place.location})", f"(receptacleType {place.id} {place.type})"]
        facts += [f"(openable {place.id})"] if place.kind in OPENABLE else []
    for thing in things:
        free = [place for place in places if thing.kind != target or place.kind != goal]
        where = rng.choice([place for place in free if place.kind not in FIXED])
        facts += [f"(objectType {thing.id} {thing.type})", f"(inReceptacle {thing.id} {where.id})"]
        facts += [f"(objectAtLocation {thing.id} {where.location})"]
        kinds = ("pickupable", "cleanable", *(("heatable", "coolable") if thing.kind in FOOD else ()))
        facts += [f"({kind} {thing.id})" for kind in kinds]
    rtypes, otypes = sorted({place.type for place in places}), sorted({thing.type for thing in things})
    facts += [f"(canContain {rtype} {otype})" for rtype in rtypes for otype in otypes]
    done = f"({DONE[task]} ?o)" if task else ""
    condition = f"(inReceptacle ?o ?r) (objectType ?o {things[0].type}) (receptacleType ?r {_type(goal)}) {done}"
    problem = f"""(define (problem kitchen) (:domain alfred) (:objects
        agent1 - agent
        {" ".join(["loc0", *(place.location for place in places)])} - location
        {" ".join(place.id for place in places)} - receptacle
        {" ".join(thing.id for thing in things)} - object
        {" ".join(rtypes)} - rtype
        {" ".join(sorted({*otypes, "KnifeType", "ButterKnifeType"}))} - otype)
      (:init {" ".join(facts)})
      (:goal (exists (?r - receptacle) (exists (?o - object) (and {condition}))))
      (:metric minimize (total-cost)))"""
    return f"put a {f'{task} ' if task else ''}{target} in {goal}", problem


class _Thing:
    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number, self.location = kind, number, f"loc{number + 1}"
        # How ALFWorld spells ids: the name up to the first bar, and a basin is recognized by the rest.
        self.id = f"sink_bar_{number}_bar_sinkbasin" if kind == "sinkbasin" else f"{kind}_bar_{number}"
        self.type = _type(kind)


def _type(kind: str) -> str:
    return {"sinkbasin": "SinkBasin"}.get(kind, kind.capitalize()) + "Type"


def player(env: AlfWorld, rng: random.Random, *, skill: float = 1.0) -> str:
    """With probability `skill` the planner's next command, otherwise a random one that works."""
    if rng.random() >= skill:
        return str(rng.choice(env.state.admissible_commands))
    inner = env.env.unwrapped
    return str(inner._pddl_state.replan(inner._entity_infos)[0])
