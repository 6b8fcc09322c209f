"""Virtual environments for engines that cannot share one with the rest: what each needs, how it is made and checked.

    asyncrl engine install vllm --cpu        # makes .venv-vllm
    asyncrl engine check vllm

vLLM and SGLang pin different builds of torch, so each runs in a process of its own under a Python of its own. A recipe
says what such an environment consists of (entry-point group ``asyncrl.engine_recipes``); it is data, and
:class:`~asyncrl.engine_venv.venv.EngineVenv` is what carries it out.
"""
