"""The gateway under 500 agents at once: what it adds to a request, and whether anything is lost or mixed up on the way.

    python benchmarks/gateway.py                prints one JSON object, on the last line
    chrt -r 1 python benchmarks/gateway.py      the same on a machine that others keep busy, if you may

Four processes, as in a run: the agents, the gateway, the controller with its router, and an engine.

First an engine of fixed pace: each answer takes it the same time and costs it next to no CPU, so that the difference
between two latencies is the way and not the work. All agents hold 10-turn conversations over HTTP; meanwhile some
callers ask the same engine directly, over the connection that the controller would use. `overhead_ms` is the
difference between both latencies at the same quantile; it holds for a machine that has CPU to spare, and `load_before`
shows whether this one had. `gateway_cpu_ms` and `controller_cpu_ms` are CPU time per request, which does not depend on
that. The engine's answers are a function of their context, so every
token that was captured can be checked: against the engine (`token_mismatches`), and for the words of another agent
(`cross_talk`).

Then the embedded engine on a tiny model, for `prefix_reuse`: of the tokens that a request repeats from earlier turns,
the share that was not prefilled again.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from rollart.config import EngineConfig, TinyModelConfig
from rollart.core import gc_tuning
from rollart.core.events import NULL_SINK
from rollart.core.types import CapturedEpisode, Completion, GenerationRequest, Outcome, Sampling, Trajectory
from rollart.engines.client import EngineClient
from rollart.engines.contexts import StreamRequest
from rollart.gateway.client import Gateway
from rollart.gateway.limits import EpisodeLimits
from rollart.launch import rpc, service
from rollart.launch.launcher import Command, ResourceRequest, service_command
from rollart.launch.local import LocalLauncher
from rollart.models import tiny
from rollart.rollout.agent_episode import AgentEpisodeRunner
from rollart.rollout.engine_registry import EngineRegistry
from rollart.rollout.router import Router
from rollart.rollout.samples import samples

ANSWER = 60  # tokens


@dataclass(frozen=True, slots=True)
class Load:
    """`answer_s` seconds for `ANSWER` tokens: 10 tokens a second."""

    agents: int = 500
    turns: int = 10
    direct: int = 50
    answer_s: float = 6.0


SMOKE = Load(agents=4, turns=3, direct=2, answer_s=0.1)
LETTERS = range(7 + 34, 7 + 34 + 57)  # of the tiny tokenizer
DEADLINE_S = 600.0


def answer_to(context: list[int]) -> list[int]:
    """What the engine of fixed pace says in this context."""
    rng = random.Random(hash(tuple(context)))
    return [*rng.choices(LETTERS, k=ANSWER - 1), tiny.SPECIAL.index(tiny.END)]


@asynccontextmanager
async def paced_engine(spec: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    async def generate(request: GenerationRequest) -> Completion:
        tokens = answer_to(request.tokens)
        await asyncio.sleep(spec["answer_s"])
        return Completion(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", len(request.tokens))

    async def stream(streamed: StreamRequest, on_part: rpc.Stream) -> Completion:
        return await generate(streamed.request)  # in one part

    yield {"generate": generate, "stream": stream}


# The agents, in a process of their own


@dataclass
class Agent:
    number: int
    url: str
    key: str
    session: aiohttp.ClientSession

    async def play(self, turns: int, spread: float) -> dict[str, Any]:
        """A conversation in which every message names the agent."""
        rng = random.Random(self.number)
        await asyncio.sleep(rng.random() * spread)
        messages: list[dict[str, str]] = [{"role": "system", "content": f"You talk to agent {self.number}. Be brief."}]
        seconds: list[float] = []
        history = cached = known = 0
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Agent {self.number}, turn {turn}: {rng.random()}"})
            took, answer = await self._ask(messages)
            seconds.append(took)
            messages.append(answer["choices"][0]["message"])
            usage = answer["usage"]
            if turn:
                history += known
                cached += min(known, usage["prompt_tokens_details"]["cached_tokens"])
            known = usage["prompt_tokens"] + usage["completion_tokens"]
        return {"seconds": seconds, "messages": messages, "history": history, "cached": cached}

    async def _ask(self, messages: list[dict[str, str]]) -> tuple[float, Any]:
        clock = asyncio.get_running_loop().time
        began = clock()
        headers = {"Authorization": f"Bearer {self.key}"}
        body = {"model": "policy", "messages": messages}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"agent {self.number} was answered {answer}")
        return clock() - began, answer


async def direct(client: EngineClient, number: int, turns: int, spread: float) -> list[float]:
    """The same load, asked of the engine itself."""
    clock, rng = asyncio.get_running_loop().time, random.Random(-number)
    await asyncio.sleep(rng.random() * spread)
    context, seconds = rng.choices(LETTERS, k=80), []
    for turn in range(turns):
        request = GenerationRequest(f"d{number}/{turn}", f"d{number}", "direct", turn, context, Sampling(max_tokens=60))
        began = clock()
        completion = await client.generate(request)
        seconds.append(clock() - began)
        context += completion.tokens + rng.choices(LETTERS, k=40)
    return seconds


async def agents(spec: dict[str, Any]) -> dict[str, Any]:
    gc_tuning.collect_rarely()
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        plays = [
            Agent(number, spec["url"], key, session).play(spec["turns"], spec["spread"])
            for number, key in enumerate(spec["keys"])
        ]
        direct_calls = []
        if spec["engine"]:
            client = EngineClient(
                await stack.enter_async_context(rpc.connected(spec["engine"], key=spec["engine_key"]))
            )
            direct_calls = [direct(client, number, spec["turns"], spec["spread"]) for number in range(spec["direct"])]
        played, asked = await asyncio.gather(asyncio.gather(*plays), asyncio.gather(*direct_calls))
    return {"agents": played, "direct": asked}


async def run_agents(spec: dict[str, Any]) -> Any:
    """In a child, so that the clients' work is not on the gateway's way."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "agents"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, _ = await child.communicate(json.dumps(spec).encode())
    finally:
        if child.returncode is None:
            child.kill()
    if child.returncode:
        raise RuntimeError("the agents failed")
    return json.loads(out)


# The controller


@dataclass
class Bench:
    """The controller's side: a launcher, a gateway, and one engine behind a router."""

    launcher: LocalLauncher
    folder: Path
    logs: Path
    load: Load

    async def play(self, command: Command, spread: float, sampling: Sampling, with_direct: bool) -> Any:
        """What the agents saw and what was captured of each."""
        engine = await self.launcher.launch(command, ResourceRequest())
        url = str(engine.answer["url"])
        gateway = Gateway(self.folder, self.launcher, NULL_SINK, self.logs)
        captured: list[CapturedEpisode] = []
        try:
            async with rpc.connected(url, key=self.launcher.key) as client, AsyncExitStack() as stack:
                await gateway.start()
                router = Router(EngineRegistry({"engine": EngineClient(client)}))
                keys, opened = [], []
                for number in range(self.load.agents):
                    limits = EpisodeLimits(f"agent-{number}", "bench", number, sampling, 8192)
                    runner = AgentEpisodeRunner(limits.id, "bench", router, NULL_SINK, lambda version: None)
                    episode = await stack.enter_async_context(gateway.episode(limits, runner.generate))
                    opened.append(episode)
                    keys.append(episode.endpoint.key)
                spec = {
                    "url": gateway.url,
                    "keys": keys,
                    "turns": self.load.turns,
                    "spread": spread,
                    "direct": self.load.direct,
                }
                spec |= {"engine": url if with_direct else "", "engine_key": self.launcher.key if with_direct else ""}
                before = cpu_ms(gateway.pid), cpu_ms(os.getpid())
                seen = await run_agents(spec)
                used = cpu_ms(gateway.pid) - before[0], cpu_ms(os.getpid()) - before[1]
                seen["gateway_cpu_ms"], seen["controller_cpu_ms"] = (
                    ms / (self.load.agents * self.load.turns) for ms in used
                )
                await stack.aclose()
                captured = [episode.captured for episode in opened if episode.captured is not None]
        finally:
            await gateway.close()
            await engine.stop()
        return seen, captured


def check(seen: list[dict[str, Any]], captured: list[CapturedEpisode], texts: Any) -> dict[str, int]:
    """Of what would be trained: tokens that the engine did not say there, and words of another agent's."""
    wrong = mixed = forks = 0
    for number, (agent, capture) in enumerate(zip(seen, captured, strict=True)):
        said = [message["content"] for message in agent["messages"] if message["role"] == "assistant"]
        mixed += [turn.action for turn in capture.turns] != said
        forks += capture.counts.forks
        for sample in samples(Trajectory("t", "t", "g", 0, 0, Outcome.FINISHED, capture.turns, 0.0)):
            tokens = sample.tokens.array.tolist()
            mixed += f"agent {number}. " not in texts(tokens)
            for turn in sample.turns:
                expected = answer_to(tokens[: turn.start])
                got = tokens[turn.start : turn.stop]
                wrong += sum(a != b for a, b in zip(got, expected, strict=False)) + len(expected) - len(got)
    return {"token_mismatches": wrong, "cross_talk": mixed, "forks": forks}


def cpu_ms(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system) * 1000


def quantile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000)[int(share * 1000) - 1] * 1000


async def bench(load: Load) -> dict[str, Any]:
    from rollart.gateway.template import ChatTemplate

    gc_tuning.collect_rarely()
    load_before = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as made:
        folder, launcher = Path(made) / "model", LocalLauncher()
        tiny.make(TinyModelConfig(hidden=32, layers=1, heads=1, kv_heads=1, context=8192), folder, seed=0)
        template = ChatTemplate(folder)
        bench = Bench(launcher, folder, Path(made), load)
        try:
            paced = Command(
                "paced engine", (__file__, "engine"), {"answer_s": load.answer_s}, Path(made) / "engine.log"
            )
            seen, captured = await bench.play(paced, load.answer_s, Sampling(max_tokens=ANSWER), with_direct=True)
            checked = check(seen["agents"], captured, template.text)
            config = EngineConfig(kv_megabytes=1024, max_batch=128)
            spec = {"model": str(folder), "weights": f"{made}/weights", "seed": 0, "version": 0}
            spec["config"] = config.model_dump(mode="json")
            torch = service_command("rollart.engines.torch.service", spec, name="engine", logs=Path(made))
            reuse, _ = await bench.play(torch, min(1.0, load.answer_s), Sampling(max_tokens=8), with_direct=False)
        finally:
            await launcher.close()
    through = [second for agent in seen["agents"] for second in agent["seconds"]]
    asked = [second for caller in seen["direct"] for second in caller]
    history = sum(agent["history"] for agent in reuse["agents"])
    return {
        "agents": load.agents,
        "requests": len(through),
        "requests_per_s": round(load.agents / statistics.fmean(through), 1),
        **{
            f"overhead_ms_p{share}": round(quantile(through, share / 100) - quantile(asked, share / 100), 2)
            for share in (50, 95, 99)
        },
        "direct_ms_p50": round(quantile(asked, 0.5), 2),
        "gateway_cpu_ms": round(seen["gateway_cpu_ms"], 3),
        "controller_cpu_ms": round(seen["controller_cpu_ms"], 3),
        "load_before": load_before,
        **checked,
        "prefix_reuse": round(sum(agent["cached"] for agent in reuse["agents"]) / history, 4),
    }


def main() -> None:
    match sys.argv[1:]:
        case ["engine"]:
            service.main(paced_engine)
        case ["agents"]:
            print(json.dumps(asyncio.run(agents(json.load(sys.stdin)))))
        case _:
            parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--smoke", action="store_true", help="tiny sizes, to check that it runs")
            print(json.dumps(asyncio.run(bench(SMOKE if parser.parse_args().smoke else Load()))))


if __name__ == "__main__":
    main()
