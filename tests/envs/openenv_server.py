"""An environment of OpenEnv behind its own server: it echoes, three times. ``python openenv_server.py DESCRIPTOR``."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    steps = 0

    def reset(self, seed=None, episode_id=None, **_):
        self.steps = 0
        return Heard(text=f"say {seed}", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **_):
        self.steps += 1
        return Heard(text=action.message, reward=float(len(action.message)), done=self.steps == 3)

    @property
    def state(self):
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=16)
    uvicorn.run(app, fd=int(sys.argv[1]), log_level="error")
