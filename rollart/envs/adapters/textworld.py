"""Generated games of TextWorld. A game takes seconds to generate, so each is cached."""

from __future__ import annotations

import hashlib
import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import textworld

from rollart.envs.adapters import CommandGame, cache_folder, instance

UNSAFE = re.compile(r"[^A-Za-z0-9 ,.'-]+")
_FIELDS = ("description", "objective", "won", "lost", "max_score", "policy_commands", "admissible_commands")
INFOS = textworld.EnvInfos(**dict.fromkeys(_FIELDS, True))


class TextWorld(CommandGame):
    """One of `games` games, by the seed; as many others are held out. Rewards are parts of the best score, 1 in all."""

    def __init__(
        self,
        *,
        rooms: int = 3,
        objects: int = 5,
        quest_length: int = 3,
        games: int = 50,
        max_actions: int = 30,
        commands: bool = False,
        held_out: bool = False,
    ) -> None:
        self.shape = {"rooms": rooms, "objects": objects, "quest_length": quest_length}
        self.games, self.max_actions, self.commands, self.held_out = games, max_actions, commands, held_out
        self.score = self.actions = 0

    def reset(self, seed: int) -> str:
        self.close()
        number = instance(seed % self.games, self.held_out)
        self.env = textworld.start(str(game_file(number, **self.shape)), INFOS)
        self.state = self.env.reset()
        self.score = self.actions = 0
        return self._text(f"{self.state.objective}\n\n{self.state.description}")

    def step(self, action: str) -> dict[str, Any]:
        self.actions += 1
        # The game reads one line; special characters such as backslashes may make its interpreter wait forever.
        command = " ".join(UNSAFE.sub(" ", action[:200]).split())
        self.state, score, over = self.env.step(command or "look")
        reward, self.score = (score - self.score) / max(1, self.state.max_score), score
        truncated = not over and self.actions >= self.max_actions
        info = {"success": bool(self.state.won)} if over or truncated else {}
        feedback = _feedback(self.state.feedback)
        step = {"messages": feedback if over else self._text(feedback), "reward": reward, "info": info}
        return {**step, "done": bool(over), "truncated": truncated}


def game_file(number: int, rooms: int, objects: int, quest_length: int) -> Path:
    """The game of that number, generated unless it is cached."""
    shape = {"rooms": rooms, "objects": objects, "quest_length": quest_length, "version": textworld.__version__}
    key = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_folder("textworld") / key
    folder.mkdir(exist_ok=True)
    path = folder / f"{number}.z8"
    if path.is_file():
        return path
    options = textworld.GameOptions()
    options.seeds = number
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        options.path = str(Path(aside) / f"{number}.z8")
        textworld.make(options)
        for suffix in (".json", ".z8"):  # the game last: once it exists, all is complete
            Path(options.path).with_suffix(suffix).replace(path.with_suffix(suffix))
    return path


def _feedback(text: str) -> str:
    """Without the prompt, the status line and the menu at the end."""
    return text.split("*** The End ***")[0].rsplit("\n>", 1)[0].strip() or "Nothing happens."


def player(env: TextWorld, rng: random.Random, *, skill: float = 1.0) -> str:
    """With probability `skill` the next command of a solution, otherwise a random one that works."""
    solution = env.state.policy_commands
    return str(solution[0] if solution and rng.random() < skill else rng.choice(env.state.admissible_commands))
