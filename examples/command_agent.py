r"""An agent that was not written for training: OpenAI's client, a calculator, and a loop. Any program can stand here.

    pip install openai
    asyncrl train examples/command_agent.toml

starts it for every episode, with the address of its session in OPENAI_BASE_URL. It runs against any other model, too,
under the name that it asks for:

    asyncrl serve MODEL --model-name gpt-5
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/command_agent.py "12+34"
"""

import json
import sys
from typing import Any

from openai import OpenAI

CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute one operation on two integers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "operator": {"type": "string", "enum": ["+", "-", "*"]},
                "b": {"type": "integer"},
            },
            "required": ["a", "operator", "b"],
        },
    },
}


def calculate(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def main(question: str) -> str:
    client = OpenAI()
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer = client.chat.completions.create(model="gpt-5", messages=messages, tools=[CALCULATOR])
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"
            try:
                result = str(calculate(**json.loads(call.function.arguments)))
            except (TypeError, ValueError, KeyError) as error:
                result = f"error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


if __name__ == "__main__":
    print(main(sys.argv[1]))
