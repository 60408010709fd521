"""A taskset of verifiers 0.4 with an environment of its own: two turns, scored by the share of digits in them."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["DigitsEnv", "DigitsTaskset"]


class DigitsTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def share_of_digits(self, trace: vf.Trace) -> float:
        text = "".join(str(message.content or "") for message in trace.assistant_messages)
        return sum(letter in "0123456789" for letter in text) / max(1, len(text))


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[DigitsTask]:
        for number in range(20):
            yield DigitsTask(vf.TaskData(prompt=f"digits {number}"), self.config.task)


class DigitsEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()


class DigitsEnv(vf.Env[DigitsEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated:
                await interaction.turn("more")
