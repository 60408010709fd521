"""Files of pairs: two conversations, of which one is better. Only what is asked for is read, by its offset.

A line is `{"chosen": [...], "rejected": [...]}`, two lists of messages, with `prompt` before both if it is given: a
list of messages or the text of one. `chosen` and `rejected` may be texts then. A file of `rollart sample`, whose lines
have `messages`, `reward` and `episode`, is made into pairs by reward: the best attempt at an episode against the worst,
the second against the second to last, and so on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rollart.config import PreferenceConfig
from rollart.core.errors import ConfigError
from rollart.core.types import EpisodeTurn
from rollart.warmup.conversations import ChatLine, turns_of

FORMAT = '{"chosen": [{"role": "user", "content": "..."}, ...], "rejected": [...]}'

NO_PAIRS = "the run file has no preference.pairs, the file of pairs to learn from"


class _PairLine(msgspec.Struct):
    """As in the file: of a pair, or of a sample."""

    chosen: list[ChatLine] | str | None = None
    rejected: list[ChatLine] | str | None = None
    prompt: list[ChatLine] | str = []
    messages: list[ChatLine] | None = None
    reward: float | None = None
    task: str = ""
    episode: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """The turns of both conversations; `place` is where they are, for messages."""

    chosen: list[EpisodeTurn]
    rejected: list[EpisodeTurn]
    place: str


class PairFile(Sequence[Pair]):
    """Reads the file once, to find the pairs. Raises ConfigError about the first line that cannot be used, or if there
    are no pairs."""

    def __init__(self, config: PreferenceConfig) -> None:
        if config.pairs is None:
            raise ConfigError(NO_PAIRS)
        self.path = config.pairs
        self._decoder = msgspec.json.Decoder(_PairLine)
        # Numbers and offsets of the lines of the chosen and of the rejected; they are the same line in a file of pairs.
        self._found: list[tuple[tuple[int, int], tuple[int, int]]] = []
        samples: dict[tuple[str, str], list[tuple[float, tuple[int, int]]]] = {}
        try:
            for at, line in self._lines():
                if line.messages is None:
                    self._pair(at, line, line)
                    self._found.append((at, at))
                else:
                    self._sample(at, line, samples)
        except OSError as error:
            raise ConfigError(f"cannot read the pairs {self.path}: {error.strerror}") from None
        for attempts in samples.values():
            self._found += _by_reward(attempts, config)
        if not self._found:
            raise ConfigError(f"{self.path} has no pairs{_why(samples, config)}")

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        """Raises ConfigError if the file was changed since it was opened."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        chosen, rejected = self._found[index]
        return self._pair(chosen, self._read(chosen), self._read(rejected))

    def _lines(self) -> Iterator[tuple[tuple[int, int], _PairLine]]:
        offset = 0
        with open(self.path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield (number, offset), self._decode(number, line)
                offset += len(line)

    def _read(self, at: tuple[int, int]) -> _PairLine:
        with open(self.path, "rb") as lines:
            lines.seek(at[1])
            return self._decode(at[0], lines.readline())

    def _decode(self, number: int, line: bytes) -> _PairLine:
        try:
            return self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.path}:{number}: {error}; a line is {FORMAT}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}:{number}: this is not JSON: {error}") from None

    def _pair(self, at: tuple[int, int], better: _PairLine, worse: _PairLine) -> Pair:
        place = f"{self.path}:{at[0]}"
        chosen = self._turns(place, "chosen", better, better.chosen)
        rejected = self._turns(place, "rejected", worse, worse.rejected)
        if chosen == rejected:
            raise ConfigError(f"{place}: chosen and rejected are the same, so there is nothing to prefer")
        return Pair(chosen, rejected, place)

    def _turns(self, place: str, key: str, line: _PairLine, said: list[ChatLine] | str | None) -> list[EpisodeTurn]:
        said = line.messages if line.messages is not None else said
        if said is None:
            raise ConfigError(f"{place}: the key {key!r} is missing; a line is {FORMAT}")
        try:
            return turns_of([*_messages(line.prompt, "user"), *_messages(said, "assistant")])
        except ValueError as error:
            raise ConfigError(f"{place}: {key}: {error}") from None

    def _sample(
        self, at: tuple[int, int], line: _PairLine, samples: dict[tuple[str, str], list[tuple[float, tuple[int, int]]]]
    ) -> None:
        if line.reward is None or not line.episode:
            missing = "reward" if line.reward is None else "episode"
            raise ConfigError(f"{self.path}:{at[0]}: a line with `messages` is a sample, which needs {missing!r}")
        self._turns(f"{self.path}:{at[0]}", "messages", line, None)
        samples.setdefault((line.task, line.episode), []).append((line.reward, at))


def pairs_problem(config: PreferenceConfig) -> str | None:
    """What is wrong with the first line that cannot be used."""
    try:
        PairFile(config)
    except ConfigError as error:
        return str(error)
    return None


def _messages(said: list[ChatLine] | str, role: str) -> list[ChatLine]:
    return [ChatLine(role, said)] if isinstance(said, str) else said


def _by_reward(
    attempts: list[tuple[float, tuple[int, int]]], config: PreferenceConfig
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    order = sorted(attempts, key=lambda attempt: -attempt[0])
    for number in range(min(config.per_episode, len(order) // 2)):
        (best, chosen), (worst, rejected) = order[number], order[-1 - number]
        if best - worst > config.min_margin:
            yield chosen, rejected


def _why(samples: dict[tuple[str, str], Any], config: PreferenceConfig) -> str:
    if not samples:
        return ""
    return (
        f": no two attempts at one of its {len(samples)} episodes differ in reward by more than {config.min_margin:g}; "
        "sample more of them (sample.samples), or at a higher temperature"
    )
