"""A guessing game as an OpenEnv server, written with the `openenv` package."""

import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.secret, self.left = random.Random(seed).randint(1, 100), 7
        return Hint(text="Guess a number from 1 to 100.")

    def step(self, action, timeout_s=None, **options):
        if action.number > 1000:
            raise RuntimeError("that is a bug of the server")
        self.left -= 1
        found = action.number == self.secret
        text = "yes" if found else "higher" if action.number < self.secret else "lower"
        return Hint(text=text, reward=float(found), done=found or not self.left)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Game, Guess, Hint, max_concurrent_envs=8)
