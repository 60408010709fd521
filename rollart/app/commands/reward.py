"""`rollart reward`: serve a reward function, package it, and compare the served one with the local one."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from rollart.app.commands.common import AsJson, guarded, print_json
from rollart.core.errors import RollartError

app = typer.Typer(
    no_args_is_help=True,
    help="Serve, package and test a reward function.\n\n"
    "[dim]rollart reward serve rollart.rewards.functions:env_return --port 8080[/dim]",
)

Target = Annotated[str, typer.Argument(metavar="MODULE:FUNCTION", help="The reward function.")]


@app.command()
@guarded
def serve(
    target: Target,
    host: Annotated[str, typer.Option(help="The address; other than localhost needs a secret.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8080,
    threads: Annotated[int, typer.Option(min=1, help="Maximum concurrent calls.")] = 8,
) -> None:
    """Serve the function over HTTP with functions-framework, as a cloud platform would.

    With a secret in ROLLART_REWARD_SECRET, unsigned requests are refused.

    [dim]rollart reward serve rollart.rewards.functions:env_return --port 8080[/dim]
    """
    from rollart.rewards import package as packaging

    packaging.serve(target, host, port, threads)


@app.command()
@guarded
def package(
    target: Target,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="A new or empty folder.")],
) -> None:
    """Write a folder that cloud platforms can deploy.

    It has a container file, requirements, handlers and all modules that the
    function imports.

    [dim]rollart reward package my_rewards:brief -o brief/[/dim]
    """
    from rollart.rewards import package as packaging

    for path in packaging.package(target, output):
        typer.echo(output / path)


@app.command()
@guarded
def test(
    target: Target,
    url: Annotated[str, typer.Option(metavar="URL", help="Where the function is served.")],
    run: Annotated[Path, typer.Option(metavar="RUN_DIR", help="The run folder whose episodes are scored.")],
    secret: Annotated[
        str | None, typer.Option(metavar="NAME", help="The environment variable with the secret, to sign requests.")
    ] = None,
    args: Annotated[str, typer.Option(metavar="JSON", help="Keyword arguments of the function.")] = "{}",
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only episodes of this task; repeatable.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes, the newest first.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Score recorded episodes with the served and the local function, and compare.

    Exits with 1 if any result differs.

    [dim]rollart reward test my_rewards:brief --url http://127.0.0.1:8080 --run runs/quickstart-1[/dim]
    """
    from rollart.rewards.comparison import recorded_episodes

    played = recorded_episodes(run, episodes, task or [])
    if not played:
        raise RollartError(f"{run} has no episode that was scored" + (f" of task {', '.join(task)}" if task else ""))
    compared, totals = asyncio.run(_compare(target, url, secret, _arguments(args), played))
    different = [each for each in compared if not each.same]
    console = Console(stderr=as_json, highlight=False)
    for each in different:
        console.print(f"{each.episode}: local {each.here}, served {each.there}", markup=False, soft_wrap=True)
    console.print(f"{len(compared)} episodes, {len(different)} differ; {totals.seconds / len(compared):.3f} s per call")
    if as_json:
        print_json({"episodes": len(compared), "different": [each.episode for each in different]})
    if different:
        raise typer.Exit(1)


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RollartError(f"--args is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise RollartError('--args must be a JSON object, such as \'{"model": "judge"}\'')
    return value


async def _compare(target: str, url: str, secret: str | None, args: dict[str, Any], played: list[Any]) -> Any:
    from pydantic import ValidationError

    from rollart.config import RewardConfig, RewardsConfig, TaskConfig
    from rollart.rewards import invokers
    from rollart.rewards.comparison import compare
    from rollart.rewards.package import import_reward

    function = import_reward(target)
    try:
        reward = RewardConfig(function=target, invoker="http", url=url, secret=secret, args=args)
    except ValidationError as error:
        raise RollartError("; ".join(each["msg"] for each in error.errors())) from None
    rewards = invokers.Rewards([TaskConfig(name="tested", env="rollart:rollart", reward=reward)], RewardsConfig())
    try:
        await rewards.start()
        return await compare(function, args, rewards, "tested", played), rewards.totals["http"]
    finally:
        await rewards.close()
