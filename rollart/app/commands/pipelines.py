"""`rollart sample`, `rollart dpo` and `rollart reward-model`: what is made from a run file beside RL."""

from typing import Annotated

import typer

from rollart.app.commands.common import AsJson, Output, Overrides, RunPath, console_for, guarded, print_json, say
from rollart.app.commands.train import Resume, RunFolderOption, run_training, with_output


@guarded
def sample(
    run_file: RunPath,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="A model folder, a checkpoint or an adapter, or a name at --endpoint; default: the run's own.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="An OpenAI-compatible API, up to /v1; its key is in OPENAI_API_KEY."),
    ] = None,
    overrides: Overrides = None,
    resume: Resume = False,
    output: Output = None,
    run_dir: RunFolderOption = None,
    as_json: AsJson = False,
) -> None:
    """Play episodes without training, and write the trajectories with their rewards to a file.

    `sample` of the run file says how many episodes of each task, how many
    attempts at each, and whether training or held-out ones. A line of
    samples.jsonl has `messages`, `reward`, `success` and `episode`: it is data
    for `rollart sft` (model.warmup.conversations) and `rollart dpo`. The same
    seeds give the same file; --resume plays what is missing.

    [dim]rollart sample examples/pipelines/sample.yaml
    rollart sample RUN.yaml --model runs/quickstart-1/model --set sample.samples=8
    rollart sample RUN.yaml --endpoint http://host:8000/v1 --model Qwen3-8B
    rollart sample RUN.yaml --set sample.held_out=true --set sample.format=parquet[/dim]
    """
    from rollart.app import api
    from rollart.app.run_reader import RunFolder
    from rollart.observe.report import scores

    run = api.load_run(run_file, with_output(overrides, output), need_model=model is None)
    if model is not None and endpoint is None:
        api.check_model(model)
    folder = api.folder_for(run.model_copy(update={"name": f"{run.name}-sample"}), run_dir, resume=resume)
    with console_for(as_json) as console:
        say(console, f"run folder: {folder}")
        file = api.sample(run, model=model, endpoint=endpoint, folder=folder, resume=resume, console=console)
        console.print(scores(RunFolder(folder).snapshot()))
        say(console, f"trajectories: {file}")
    if as_json:
        print_json({"file": str(file), **RunFolder(folder).summary()})


@guarded
def dpo(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Resume = False,
    output: Output = None,
    run_dir: RunFolderOption = None,
    as_json: AsJson = False,
) -> None:
    """Train on pairs of conversations, of which one is better (DPO, IPO).

    `preference.pairs` is a file with {"chosen": [...], "rejected": [...]} on
    each line, or the samples.jsonl of `rollart sample`, whose attempts at an
    episode are paired by reward. The reference is the model that the run
    starts from; with LoRA, the same model without adapters. Steps, learning
    rate, checkpoints and evaluations are those of `rollart train`: a step takes
    `training.batch_groups` pairs, and held-out episodes are played before,
    after and in between.

    [dim]rollart dpo examples/pipelines/dpo.yaml --set preference.pairs=runs/lake-sample-1/samples.jsonl
    rollart dpo RUN.yaml --set training.algorithm.loss=ipo --set training.algorithm.beta=0.05[/dim]
    """
    run_training("dpo", run_file, with_output(overrides, output), run_dir, resume=resume, as_json=as_json)


@guarded
def reward_model(
    run_file: RunPath,
    overrides: Overrides = None,
    resume: Resume = False,
    output: Output = None,
    run_dir: RunFolderOption = None,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on pairs of conversations, of which one is better.

    The model of the run file gets a head for one number in place of that for
    tokens, and learns to score the better conversation higher (Bradley-Terry).
    Pairs are those of `rollart dpo`; a share of them, `preference.held_out`, is
    never trained: how many of these are ranked right is reported before, after
    and every `evaluation.every` steps. Nothing is generated. The folder that it
    leaves is a reward of any task: {function: reward_model, args: {model: DIR}}.

    [dim]rollart sample examples/pipelines/sample.yaml
    rollart reward-model examples/pipelines/reward_model.yaml
    rollart reward-model RUN.yaml --set preference.pairs=pairs.jsonl --resume[/dim]
    """
    run_training("reward-model", run_file, with_output(overrides, output), run_dir, resume=resume, as_json=as_json)
