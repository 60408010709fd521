"""Writes the folder that a platform needs to run a reward function: the same function, with no edits."""

import shutil
from pathlib import Path

from rollart.config.import_check import problem
from rollart.core.errors import RollartError
from rollart.rewards.closure import closure
from rollart.rewards.wire import SECRET

RUNTIME = "rollart.rewards.runtime"
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

Set {secret} wherever anybody can reach the URL: unsigned requests are then refused.

In the run file:

    reward: {{function: "{target}", invoker: http, url: "https://...", secret: {secret}}}
    reward: {{function: "{target}", invoker: lambda, name: reward}}
    reward: {{function: "{target}", invoker: fc, name: reward}}
"""


def package(target: str, folder: Path) -> list[Path]:
    """Write all of it to `folder`, which must be empty or not exist; the files, in order. Raises RollartError."""
    wrong = problem(target)
    if wrong:
        raise RollartError(f"the reward {wrong}")
    if folder.exists() and any(folder.iterdir()):
        raise RollartError(f"{folder} is not empty; choose another folder")
    needed = closure(target.partition(":")[0], RUNTIME)
    if clash := {Path("main.py"), Path("handler.py")} & set(needed.files):
        raise RollartError(f"your module {clash.pop()} has the name of a file of the package; give it another")
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
