"""Packages a reward function for serverless platforms, unchanged, and serves it on this machine with the same file."""

import os
import runpy
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from rollart.config.import_check import problem
from rollart.core.errors import RollartError
from rollart.rewards.closure import closure
from rollart.rewards.runtime import RewardFunction, find_function
from rollart.rewards.wire import SECRET

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FRAMEWORK = "functions_framework"

MAIN = '''"""{target} for functions-framework, which Cloud Run, Cloud Functions and Knative run."""

import functions_framework

from rollart.rewards.runtime import JSON, Runtime

reward = Runtime({target!r})


@functions_framework.http
def score(request):
    status, answer = reward.http(request.method, request.headers, request.get_data())
    return answer, status, JSON
'''

HANDLER = '''"""{target} for AWS Lambda and Alibaba Function Compute: the handler is `handler.handler` on both."""

from rollart.rewards.runtime import Runtime

reward = Runtime({target!r})


def handler(event, context):
    return reward.event(event)
'''

CONTAINER = """FROM python:3.11-slim
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
USER nobody
ENV PORT=8080
CMD exec functions-framework --target=score --host=0.0.0.0 --port=$PORT
"""

README = """# {target}

Run it here:             pip install -r requirements.txt && functions-framework --target=score
As a container:          docker build -t reward . && docker run -p 8080:8080 -e {secret} reward
On Cloud Run:            gcloud run deploy reward --source . --set-env-vars {secret}=...
On Lambda:               pip install -r requirements-handler.txt -t . && zip -r reward.zip .
On Function Compute:     the same zip; on both the handler is handler.handler

Set {secret} if the URL is public: unsigned requests are then refused.

In the run file:

    reward: {{function: "{target}", invoker: http, url: "https://...", secret: {secret}}}
    reward: {{function: "{target}", invoker: lambda, name: reward}}
    reward: {{function: "{target}", invoker: fc, name: reward}}
"""


def package(target: str, folder: Path) -> list[Path]:
    """Write the package to `folder`, which must be empty or not exist; returns its files. Raises RollartError."""
    wrong = problem(target)
    if wrong:
        raise RollartError(f"the reward {wrong}")
    if folder.exists() and any(folder.iterdir()):
        raise RollartError(f"{folder} is not empty; choose another folder")
    needed = closure(target.partition(":")[0], "rollart.rewards.runtime")
    if clash := {Path("main.py"), Path("handler.py")} & set(needed.files):
        raise RollartError(f"your module {clash.pop()} has the name of a file of the package; rename it")
    for where, source in needed.files.items():
        (folder / where).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, folder / where)
    handler = needed.requirements()
    needed.packages.add(FRAMEWORK)
    texts = {
        "main.py": MAIN.format(target=target),
        "handler.py": HANDLER.format(target=target),
        "requirements.txt": "\n".join([*needed.requirements(), ""]),
        "requirements-handler.txt": "\n".join([*handler, ""]),
        "Dockerfile": CONTAINER,
        "README.md": README.format(target=target, secret=SECRET),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())


def import_reward(target: str) -> RewardFunction:
    """Raises RollartError."""
    try:
        return find_function(target)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise RollartError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error


def serve(target: str, host: str, port: int, threads: int) -> None:
    """Serve the function in this process until it is interrupted. Raises RollartError if it cannot start."""
    if find_spec(FRAMEWORK) is None:
        raise RollartError("serving needs functions-framework; run: pip install 'rollart[serve]'")
    if host not in LOOPBACK and not os.environ.get(SECRET):
        raise RollartError(f"on {host} it would accept unsigned requests; set {SECRET} first")
    import_reward(target)
    with tempfile.TemporaryDirectory(prefix="rollart-reward-") as folder:
        source = Path(folder) / "main.py"
        source.write_text(MAIN.format(target=target), encoding="utf-8")
        os.environ["THREADS"] = str(threads)
        sys.argv = ["functions-framework", f"--source={source}", "--target=score", f"--host={host}", f"--port={port}"]
        print(f"listening on http://{host}:{port}", file=sys.stderr, flush=True)
        # As `python -m functions_framework` would, but in this process: signals and modules are the user's own.
        runpy.run_module(FRAMEWORK, run_name="__main__")
