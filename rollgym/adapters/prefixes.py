"""Prefixes of environment ids, one for each library that has an adapter here.

A table without other imports: ``import rollgym`` reads it, and imports an adapter when an id needs it.
"""

from __future__ import annotations

from rollgym.core.env_prefixes import EnvPrefix

GEM = EnvPrefix(
    name="gem",
    entry_point="rollgym.adapters.gem:GemEnv",
    package="gem-llm",
    module="gem",
    versions=(0, 1),
    example="gem:game:GuessTheNumber-v0-easy",
    summary="Games and tasks of GEM",
)

MINIWOB = EnvPrefix(
    name="miniwob",
    entry_point="rollgym.adapters.miniwob:MiniwobEnv",
    package="miniwob",
    module="miniwob",
    versions=(1, 1),
    example="miniwob:click-button",
    summary="Small web pages of MiniWoB++, in a browser",
)

OPENENV = EnvPrefix(
    name="openenv",
    entry_point="rollgym.adapters.openenv:OpenEnvEnv",
    package="websockets",
    module="websockets",
    versions=(),
    example="openenv:ws://127.0.0.1:8000",
    summary="An environment on an OpenEnv server",
    from_files=False,
)

REASONING_GYM = EnvPrefix(
    name="reasoning_gym",
    entry_point="rollgym.adapters.reasoning_gym:ReasoningGymEnv",
    package="reasoning-gym",
    module="reasoning_gym",
    versions=(0, 1),
    example="reasoning_gym:leg_counting",
    summary="Generated questions with verifiable answers, one turn each",
)

TEXTARENA = EnvPrefix(
    name="textarena",
    entry_point="rollgym.adapters.textarena:make_env",
    package="textarena",
    module="textarena",
    versions=(0, 7),
    example="textarena:TicTacToe-v0",
    summary="Games for one or more players",
)

VERIFIERS = EnvPrefix(
    name="verifiers",
    entry_point="rollgym.adapters.verifiers:VerifiersEnv",
    package="verifiers",
    module="verifiers.v1",
    versions=(0, 4),
    example="verifiers:my-taskset",
    summary="Task sets of verifiers, installed as packages",
    from_files=False,
)

PREFIXES = (GEM, MINIWOB, OPENENV, REASONING_GYM, TEXTARENA, VERIFIERS)
