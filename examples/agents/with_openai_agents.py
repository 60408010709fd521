"""An agent of the OpenAI Agents SDK, two runs, the second goes on from the first."""

from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI

from rollart.core.endpoint import AgentEpisode, Endpoint

set_tracing_disabled(True)  # no data leaves this machine


async def play(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, object]:
    """The reward is the share of digits in both answers."""
    async with AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
        model = OpenAIChatCompletionsModel(endpoint.model, client)
        agent = Agent("digits", instructions="say digits", model=model)
        first = await Runner.run(agent, f"digits {episode.seed % 10}")
        second = await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "more"}])
    text = f"{first.final_output}{second.final_output}"
    share = sum(letter in "0123456789" for letter in text) / max(1, len(text))
    return {"reward": share, "success": share > 0.9}
