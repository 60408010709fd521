"""What is to be done in the shop: put two kinds of things on the shelf, as a user asks for one after the other."""

import json
import random

ITEMS = ("apples", "pears", "plums")


class Shop:
    def begin(self, client, seed):
        client.call("clear", {})
        rng = random.Random(seed)
        self.wanted = {item: rng.randint(1, 9) for item in rng.sample(ITEMS, 2)}
        self.asked = list(self.wanted)
        return self._ask()

    def follow(self, answer):
        return self._ask() if self.asked else None

    def score(self, client, calls, answer):
        return float(json.loads(client.read("shop://stock")) == self.wanted)

    def _ask(self):
        item = self.asked.pop(0)
        return f"put {self.wanted[item]} {item}"
