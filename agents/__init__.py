"""Built-in agents: random, expert, human, scripted, and language models."""

from rollgym.core.agent import register_agent

_HERE = "rollgym.agents"


def register_all() -> None:
    """Register every agent of this package by name, without importing it."""
    register_agent("random", f"{_HERE}.random:RandomAgent", summary="a random valid action each turn")
    register_agent(
        "expert", f"{_HERE}.expert:make_expert", summary="the environment's own expert or baseline"
    )
    register_agent("human", f"{_HERE}.human:HumanAgent", summary="you, at the terminal")
    register_agent("scripted", f"{_HERE}.scripted:ScriptedAgent", summary="actions from a file (path=FILE)")
    register_agent(
        "chat", f"{_HERE}.chat.agent:make_chat", summary="any OpenAI-compatible endpoint (model=NAME)"
    )
    register_agent(
        "lm",
        f"{_HERE}.policy.agent:make_policy_agent",
        summary="a local model with token ids and log-probs (model=DIR)",
    )
