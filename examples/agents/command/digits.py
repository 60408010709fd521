"""An agent that is a program: it knows nothing of rollart but a few variables, and could be in any language."""

import json
import os
import pathlib
import urllib.request

episode = json.loads(os.environ["ROLLART_EPISODE"])
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages: list[dict[str, str]] = []
text = ""
for turn in range(episode["args"]["turns"]):
    messages.append({"role": "user", "content": f"digits {turn}"})
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        said = json.load(response)["choices"][0]["message"]["content"]
    messages.append({"role": "assistant", "content": said})
    text += said
share = sum(letter in "0123456789" for letter in text) / max(1, len(text))
pathlib.Path(os.environ["ROLLART_REWARD"]).write_text(json.dumps({"reward": share, "success": share > 0.9}))
