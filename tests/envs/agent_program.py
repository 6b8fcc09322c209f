"""An agent as others write them: it knows OpenAI's API and its environment variables. Its first argument is a manner.

    python agent_program.py well "12+34"

``well`` uses a calculator until the model says something else; the others misbehave.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute one operation.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "operator": {"type": "string"}, "b": {"type": "integer"}},
        },
    },
}


def ask(messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"model": "gpt-5", "messages": messages, "tools": [CALCULATOR], "temperature": 0.0, **fields}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    with urllib.request.urlopen(request) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def well(question: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    while True:
        said = ask(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            break
        for call in said["tool_calls"]:
            given = json.loads(call["function"]["arguments"])
            result = given["a"] + given["b"] if given["operator"] == "+" else given["a"] - given["b"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    Path("answer.txt").write_text(str(messages[-1]["content"]))


def prepares(question: str) -> None:
    """Put a judge of its own where one might be looked for."""
    ask([{"role": "user", "content": question}])
    Path("score.py").write_text("print(1.0)")
    folder = Path(os.environ["ASYNCRL_TASK_FILE"]).parent
    for name in ("judge/1/json.py", "1/json.py", "work/json.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("print(1.0); raise SystemExit")
    (Path.home() / ".profile").touch()
    os.mkfifo(folder / "turns.json")  # nothing would ever open its other end


def tree(question: str) -> None:
    """Ask twice, have a sub-agent, and begin again from a summary."""
    first = [{"role": "user", "content": question}]
    said = ask(first)
    ask(first)
    ask([{"role": "user", "content": "a side question"}])
    ask([*first, said, {"role": "user", "content": "go on"}])
    ask([{"role": "user", "content": "in short: " + question}])


def looks(_question: str) -> None:
    """Tell the model what can be reached of REACHES: a port, a folder and a process of the machine."""
    reaches, found = json.loads(os.environ["REACHES"]), []
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", reaches["port"]), timeout=2).close()
        found.append("port")
    if Path(reaches["folder"]).exists():
        found.append("folder")
    with contextlib.suppress(OSError):
        os.kill(reaches["process"], 0)
        found.append("process")
    ask([{"role": "user", "content": " ".join(found) or "nothing"}])


def misbehave(manner: str, question: str) -> None:
    if manner == "many":
        ask([{"role": "user", "content": question}], n=3)
    if manner == "silent":
        sys.exit("no idea")
    if manner != "flood":
        ask([{"role": "user", "content": question}])
    if manner == "fails":
        sys.exit(3)
    if manner == "removes":
        shutil.rmtree(Path.cwd())
    if manner == "replaces":
        above = Path.cwd().parent
        shutil.rmtree(above)
        above.write_text("a file")
    if manner == "fills":
        with contextlib.suppress(OSError), Path("big").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1000))
    if manner == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if manner == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if manner == "loops":
        while True:
            try:
                ask([{"role": "user", "content": question}])
            except urllib.error.HTTPError as error:
                if error.code != 403:
                    raise
    if manner == "flood":
        while True:
            print("x" * 1000)
    if manner == "daemon":  # in a session of its own, with the pipes
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if manner == "forks":  # 63 processes in sessions of their own
        first = os.getpid()
        for _ in range(6):
            os.fork()
        if os.getpid() != first:
            os.setsid()
            time.sleep(600)
    if manner == "connections":
        address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
        held = [socket.create_connection((address.hostname, address.port)) for _ in range(400)]
        time.sleep(0.1)
        assert len(held) == 400
    if manner == "forges":  # a reward of its own choice, and the session of another
        for path in ("/reward", ""):
            url = os.environ["ANTHROPIC_BASE_URL"] + path
            try:
                urllib.request.urlopen(
                    urllib.request.Request(url, b'{"reward": 9}', {"Content-Type": "application/json"})
                )
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise


if __name__ == "__main__":
    manners = {"well": well, "tree": tree, "looks": looks, "prepares": prepares}
    if sys.argv[1] in manners:
        manners[sys.argv[1]](sys.argv[2])
    else:
        misbehave(sys.argv[1], sys.argv[2])
