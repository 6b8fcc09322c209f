"""A small MCP server on stdio, which misbehaves as its argument says. Run with `python -I -S`, it starts in 20 ms."""

import json
import os
import sys
import time

manner = sys.argv[1] if len(sys.argv) > 1 else "well"
notes = []
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


def say(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def called(name, arguments):
    if manner == "dies":
        print("out of luck", file=sys.stderr)
        sys.exit(3)
    if manner == "prints":
        print("a debugging line", flush=True)
    if manner == "floods":
        sys.stdout.write("x" * (64 << 20))
    while manner == "chatters":
        say({"method": "notifications/message", "params": {}})
    if manner == "hangs":
        time.sleep(1000)
    if manner == "forks" and os.fork() == 0:
        time.sleep(1000)
    if manner == "asks":
        say({"id": "q", "method": "ping"})
        assert json.loads(sys.stdin.readline()) == {"jsonrpc": "2.0", "id": "q", "result": {}}
    if name == "add":
        if not isinstance(arguments.get("a"), int) or not isinstance(arguments.get("b"), int):
            return {"content": [{"type": "text", "text": "a and b must be integers"}], "isError": True}
        notes.append(arguments["a"] + arguments["b"])
        return {"content": [{"type": "text", "text": str(notes[-1])}, {"type": "image", "data": "", "mimeType": ""}]}
    return {"content": [], "structuredContent": {"sums": notes}}


for line in sys.stdin:
    message = json.loads(line)
    method = message["method"]
    if method == "initialize":
        say({"id": message["id"], "result": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {}}})
    elif method == "tools/list":
        schema = "none" if manner == "broken" else OBJECT
        if "cursor" not in message["params"]:
            tools = [{"name": "add", "description": "Add two integers.", "inputSchema": schema}]
            if manner == "repeats":
                tools *= 2
            say({"id": message["id"], "result": {"tools": tools, "nextCursor": "2"}})
        else:
            tools = [{"name": "sums", "inputSchema": {"type": "object"}}]
            say({"id": message["id"], "result": {"tools": tools}})
    elif method == "tools/call":
        name = message["params"]["name"]
        if name in ("add", "sums") and manner not in ("refuses", "raises"):
            say({"id": message["id"], "result": called(name, message["params"]["arguments"])})
        else:
            code = {"refuses": -32000, "raises": -32603}.get(manner, -32602)
            say({"id": message["id"], "error": {"code": code, "message": f"no {name}"}})
if manner == "stays":
    time.sleep(1000)
