"""An agent that runs in the sandbox of a trial: it asks the policy once and writes down what it says."""

import json
import os
import pathlib
import urllib.request

asked = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "digits"}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(asked).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request, timeout=60) as response:
    said = json.load(response)["choices"][0]["message"]["content"]
pathlib.Path("answer.txt").write_text(said)
