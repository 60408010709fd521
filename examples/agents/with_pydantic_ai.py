"""An agent of pydantic-ai: it wants an answer of digits only, and the framework asks again until it gets one."""

from contextlib import suppress

from pydantic_ai import Agent, ModelRetry, RunContext, UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from rollart.core.endpoint import AgentEpisode, Endpoint


async def play(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, object]:
    """The reward is the share of digits in all that it said."""
    model = OpenAIChatModel(endpoint.model, provider=OpenAIProvider(endpoint.base_url, endpoint.key))
    agent = Agent(model, deps_type=list, retries=1)

    @agent.output_validator
    def only_digits(context: RunContext[list[str]], answer: str) -> str:
        context.deps.append(answer)
        if not answer.isdecimal():
            raise ModelRetry("digits only")
        return answer

    said: list[str] = []
    with suppress(UnexpectedModelBehavior):  # no good answer, or an empty one, after the retry
        await agent.run(f"digits {episode.seed % 10}", deps=said)
    text = "".join(said)
    share = sum(letter in "0123456789" for letter in text) / max(1, len(text))
    return {"reward": share, "success": share > 0.9}
