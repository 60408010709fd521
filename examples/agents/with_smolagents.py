"""An agent of smolagents: it writes Python, the framework runs it and shows what it printed, for two steps."""

from smolagents import CodeAgent, LogLevel, OpenAIModel, PromptTemplates
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

from rollart.core.endpoint import AgentEpisode, Endpoint

PROMPTS = PromptTemplates({**EMPTY_PROMPT_TEMPLATES, "system_prompt": "python"})  # the usual ones have 10,000 letters


def play(endpoint: Endpoint, episode: AgentEpisode) -> dict[str, object]:
    """The reward is the share of digits in what the model wrote."""
    model = OpenAIModel(endpoint.model, api_base=endpoint.base_url, api_key=endpoint.key)
    agent = CodeAgent(
        tools=[],
        model=model,
        prompt_templates=PROMPTS,
        max_steps=2,
        verbosity_level=LogLevel.OFF,
        code_block_tags="markdown",
    )
    agent.run(f"digits {episode.seed % 10}")
    said = [str(step.model_output) for step in agent.memory.steps if getattr(step, "model_output", None)]
    text = "".join(said).replace("```", "")  # which the framework puts after an answer that lacks it
    share = sum(letter in "0123456789" for letter in text) / max(1, len(text))
    return {"reward": share, "success": share > 0.9}
