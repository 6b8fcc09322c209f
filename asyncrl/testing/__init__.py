"""Fakes and a virtual clock for tests of programs built on asyncrl."""

from asyncrl.testing.fakes import (
    EchoEngine,
    EchoEnvironment,
    EchoFactory,
    EmptyTransport,
    ScriptedEngine,
    VersionEchoEngine,
)

__all__ = ["EchoEngine", "EchoEnvironment", "EchoFactory", "EmptyTransport", "ScriptedEngine", "VersionEchoEngine"]
