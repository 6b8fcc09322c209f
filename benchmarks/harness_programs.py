"""Agents on SDKs that others wrote, each with a calculator: python harness_programs.py NAME TASK, in the SDK's Python.

The model's address is where each of them looks for it: in the environment. `benchmarks/agents.py` starts them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any


def calculator(a: int, b: int) -> str:
    """Add two integers.

    Args:
        a: one
        b: the other
    """
    return str(a + b)


def openai_agents(task: str) -> Any:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="adder", instructions="Use the calculator.", tools=[function_tool(calculator)])
    return Runner.run_sync(agent, task, max_turns=40).final_output


def openai_agents_chat(task: str) -> Any:
    from agents import set_default_openai_api

    set_default_openai_api("chat_completions")
    return openai_agents(task)


def pydantic_ai(task: str) -> Any:
    from pydantic_ai import Agent

    return Agent("openai-chat:gpt-5", tools=[calculator]).run_sync(task).output


def langgraph(task: str) -> Any:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model="gpt-5"), [calculator])
    return agent.invoke({"messages": [("user", task)]}, {"recursion_limit": 100})["messages"][-1].content


def smolagents(task: str) -> Any:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("gpt-5", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return ToolCallingAgent(tools=[tool(calculator)], model=model, max_steps=40, verbosity_level=0).run(task)


def autogen(task: str) -> Any:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def run() -> Any:
        client = OpenAIChatCompletionClient(model="gpt-4o", base_url=os.environ["OPENAI_BASE_URL"])
        agent = AssistantAgent("adder", client, tools=[calculator], max_tool_iterations=40)
        return (await agent.run(task=task)).messages[-1]

    return asyncio.run(run())


def crewai(task: str) -> Any:
    from crewai import LLM, Agent, Crew, Task
    from crewai.tools import tool

    llm = LLM(model="openai/gpt-4o", base_url=os.environ["OPENAI_BASE_URL"])
    adder = Agent(
        role="adder", goal="add", backstory="adds", tools=[tool("calculator")(calculator)], llm=llm, max_iter=40
    )
    work = Task(description=task, expected_output="a number", agent=adder)
    return Crew(agents=[adder], tasks=[work]).kickoff()


def dspy(task: str) -> Any:
    import dspy

    dspy.configure(lm=dspy.LM("openai/gpt-4o", cache=False), adapter=dspy.ChatAdapter())
    return dspy.ReAct("question -> answer", tools=[calculator], max_iters=40)(question=task).answer


if __name__ == "__main__":
    print(globals()[sys.argv[1]](sys.argv[2]))
