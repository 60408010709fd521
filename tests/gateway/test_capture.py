"""Whatever a client does, what is trained was sampled by the version recorded, in its context, and is trained once."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from chatml import CHATML, byte_pairs
from gateways import KEY, episode_limits
from hypothesis import given, settings
from hypothesis import strategies as st
from wire import Left, post

from rollart.core.protocols import TokenStream
from rollart.core.types import Completion, GenerationRequest, Outcome, Trajectory
from rollart.gateway.app import App
from rollart.gateway.limits import GatewayLimits
from rollart.gateway.session import SessionTable
from rollart.gateway.template import ChatTemplate
from rollart.rollout.samples import samples

Messages = list[dict[str, Any]]
BEHAVIOURS = (
    *("go on", "go on", "go on", "begin", "retry", "edit", "drop", "summarise", "parallel", "leave early"),
    *("leave in mid-stream", "leave in mid-stream", "choose one of two", "tokens", "strip", "stop", "stop"),
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    path = tmp_path_factory.mktemp("bpe")
    byte_pairs(CHATML).save_pretrained(path)
    return ChatTemplate(path)


@dataclass
class Sampler:
    """Draws tokens from the whole vocabulary, so their text nearly always tokenizes to something else. Who listens is
    streamed one after the other; the engine may be lost in between, and learns late that it may stop."""

    rng: Random
    vocabulary: int
    stop: int
    version: int = 0
    seen: list[tuple[tuple[int, ...], Completion]] = field(default_factory=list)

    def draw(self) -> list[int]:
        tokens = [self.rng.randrange(2, self.vocabulary) for _ in range(self.rng.randint(1, 6))]
        return [*tokens, self.stop] if self.rng.random() < 0.8 else tokens

    async def reported(self, tokens: list[int], stream: TokenStream) -> list[int]:
        """Those that there are when the listener has had enough."""
        for at in range(0, len(tokens), stream.every):
            end = at + stream.every
            if stream.on_tokens(tokens[at:end]):
                return tokens[: end + self.rng.randint(0, 2)]
            await asyncio.sleep(0)
        return tokens

    async def generate(self, request: GenerationRequest, stream: TokenStream | None = None, /) -> Completion:
        await asyncio.sleep(0)
        tokens = self.draw()
        if stream is not None:
            tokens = await self.reported(tokens, stream)
        before = self.version
        self.version += self.rng.random() < 0.3  # a weight swap, perhaps in the middle
        versions = [before] * (len(tokens) // 2) + [self.version] * (len(tokens) - len(tokens) // 2)
        logprobs = [-self.rng.random() for _ in tokens]
        completion = Completion(tokens, logprobs, versions, "stop" if tokens[-1] == self.stop else "length")
        self.seen.append((tuple(request.tokens), completion))
        return completion


@dataclass
class Client:
    app: App
    rng: Random
    conversations: list[Messages] = field(default_factory=list)
    delivered: int = 0

    async def ask(self, messages: Messages, **more: Any) -> list[dict[str, Any]]:
        leave = more.pop("leave_after", None)
        status, answer = await post(
            self.app, "/v1/chat/completions", {"messages": messages, **more}, KEY, leave_after=leave
        )
        lost = isinstance(answer, list) and "error" in answer[-1]
        if lost or status == 503:  # an engine that was lost in the middle
            raise Left
        assert status == 200, answer
        self.delivered += more.get("n", 1)
        if more.get("stream"):
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in answer if event["choices"])
            return [{"role": "assistant", "content": text}]
        return [choice["message"] for choice in answer["choices"]]

    def word(self) -> str:
        return "".join(self.rng.choice("user l\nxyz") for _ in range(self.rng.randint(1, 12)))

    async def do(self, behaviour: str) -> None:
        if behaviour == "begin" or not self.conversations:
            self.conversations.append([{"role": "user", "content": self.word()}])
            self.conversations[-1] += await self.ask(self.conversations[-1])
            return
        talk = self.rng.choice(self.conversations)
        asked = [*talk, {"role": "user", "content": self.word()}]
        match behaviour:
            case "go on":
                with suppress(Left):
                    talk[:] = [*asked, *await self.ask(asked, stream=self.rng.random() < 0.5)]
            case "stop":
                stops = [self.rng.choice("user l\nxyz") for _ in range(self.rng.randint(1, 2))]
                with suppress(Left):
                    talk[:] = [*asked, *await self.ask(asked, stop=stops, stream=self.rng.random() < 0.5)]
            case "retry":
                await self.ask(asked)
                talk[:] = [*asked, *await self.ask(asked)]
            case "edit":
                changed = self.rng.randrange(len(asked))
                asked[changed] = {**asked[changed], "content": self.word()}
                talk[:] = [*asked, *await self.ask(asked)]
            case "drop":
                kept = asked[-1:] if self.rng.random() < 0.5 else [*asked[:1], *asked[-1:]]
                talk[:] = [*kept, *await self.ask(kept)]
            case "summarise":
                talk[:] = [{"role": "user", "content": "so far: " + self.word()}]
                talk += await self.ask(talk)
            case "parallel":
                other = [*talk, {"role": "user", "content": self.word()}]
                first, second = await asyncio.gather(self.ask(asked), self.ask(other))
                self.conversations.append([*other, *second])
                talk[:] = [*asked, *first]
            case "leave early" | "leave in mid-stream":
                pieces = 0 if behaviour == "leave early" else self.rng.randint(1, 4)
                with suppress(Left):  # it may have had everything by then
                    talk[:] = [*asked, *await self.ask(asked, stream=True, leave_after=pieces)]
            case "choose one of two":
                talk[:] = [*asked, self.rng.choice(await self.ask(asked, n=2))]
            case "strip":
                answer = (await self.ask(asked))[0]
                talk[:] = [
                    *asked,
                    {"role": "assistant", "content": [{"type": "text", "text": answer["content"].strip()}]},
                ]
            case "tokens":
                body = {
                    "token_ids": [self.rng.randrange(2, 40) for _ in range(5)],
                    "sampling_params": {"max_tokens": 8},
                }
                for _ in range(2):
                    status, answer = await post(self.app, "/inference/v1/generate", body, KEY)
                    assert status == 200
                    self.delivered += 1
                    body["token_ids"] += [*answer["choices"][0]["token_ids"], 17]


@settings(max_examples=150)
@given(seed=st.integers(0, 10**6), behaviours=st.lists(st.sampled_from(BEHAVIOURS), min_size=1, max_size=14))
def test_every_trained_token_was_sampled_in_its_context(
    template: ChatTemplate, seed: int, behaviours: list[str]
) -> None:
    rng = Random(seed)
    sampler = Sampler(rng, 2 + 256 + 6, template.stop[0])
    sessions = SessionTable(template, sampler.generate)
    sessions.open(KEY, episode_limits(max_context=10**6))
    client = Client(App(template, sessions, GatewayLimits(), "policy"), rng)

    async def play() -> None:
        for behaviour in behaviours:
            await client.do(behaviour)

    asyncio.run(play())
    captured = sessions.close(KEY)
    assert len(captured.turns) == client.delivered
    trajectory = Trajectory("t", "t", "g", 0, 0, Outcome.FINISHED, captured.turns, 1.0)
    left, trained = list(sampler.seen), 0
    for sample in samples(trajectory):
        tokens, made_by = sample.tokens.array.tolist(), iter(sample.versions.array.tolist())
        for span in sample.turns:
            begin, at, turn = span.start, span.stop, captured.turns[span.number]
            assert all(sample.mask[begin:at])
            context, made = next(
                (context, made) for context, made in left if tuple(made.logprobs[: at - begin]) == turn.logprobs
            )
            left.remove((context, made))
            trained += 1
            assert tuple(tokens[:begin]) == context
            assert tokens[begin:at] == made.tokens[: at - begin]
            assert [next(made_by) for _ in range(begin, at)] == made.versions[: at - begin]
            assert at - begin == len(made.tokens) or turn.finish == "length"  # a stop string
    assert trained == len(captured.turns)
    assert captured.counts.undelivered + len(captured.turns) <= len(sampler.seen)


@settings(max_examples=30)
@given(seed=st.integers(0, 10**6), turns=st.integers(2, 10))
def test_a_conversation_that_is_only_continued_is_one_segment(template: ChatTemplate, seed: int, turns: int) -> None:
    rng = Random(seed)
    sampler = Sampler(rng, 2 + 256 + 6, template.stop[0])
    sessions = SessionTable(template, sampler.generate)
    sessions.open(KEY, episode_limits(max_context=10**6))
    client = Client(App(template, sessions, GatewayLimits(), "policy"), rng)

    async def play() -> None:
        for _ in range(turns):
            await client.do(rng.choice(["go on", "strip"]))

    asyncio.run(play())
    captured = sessions.close(KEY)
    assert {turn.segment for turn in captured.turns} == {0}
    assert (captured.counts.forks, captured.counts.retries) == (0, 0)
    for before, after in zip(sampler.seen, sampler.seen[1:], strict=False):
        assert after[0][: len(before[0]) + len(before[1].tokens)] == (*before[0], *before[1].tokens)
