"""The options saved in the folder of a trained policy, checked as strictly as those of a user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rollgym.agents.policy.options import PolicyOptions
from rollgym.agents.prompting import TEMPLATES
from rollgym.core.agent import AgentSetup
from rollgym.core.errors import UsageError
from rollgym.models.policy_settings import (
    MODEL_SETTINGS,
    ModelSettings,
    TrainedEnv,
    read_model_settings,
    settings_in_words,
)

PATTERN_CHARS = 1000
"""Longest parser that is read from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedOptions:
    """The options that a policy was trained with."""

    options: dict[str, Any]
    template_text: str
    envs: tuple[TrainedEnv, ...]

    def notes(self, folder: Path, overrides: Mapping[str, Any], setup: AgentSetup) -> list[str]:
        """Return notes on the saved settings in use, and on environment settings unlike those of training."""
        used = {
            option.name: self.options[option.name]
            for option in fields(PolicyOptions)
            if option.name not in overrides and self.options[option.name] != _default(option)
        }
        words = settings_in_words(used) or "the defaults"
        notes = [f"settings from {folder / MODEL_SETTINGS}: {words} (--agent-arg overrides)"]
        trained = [env for env in self.envs if env.id == setup.env_id]
        env_kwargs = dict(setup.env_kwargs)
        if trained and all(env.kwargs != env_kwargs for env in trained):
            changed = {k: v for k, v in trained[0].kwargs.items() if env_kwargs.get(k, MISSING) != v}
            extra = [name for name in env_kwargs if name not in trained[0].kwargs]
            words = "".join(f" --env-arg {settings_in_words({k: v})}" for k, v in changed.items())
            sentence = f"the policy was trained in {setup.env_id} with other settings:"
            if changed:
                sentence += f" add{words} to evaluate it as it was trained"
            if extra:
                sentence += f"{' and' if changed else ''} leave out {', '.join(extra)}"
            notes.append(sentence)
        return notes


def saved_options(folder: Path) -> SavedOptions | None:
    """Read the options of a model folder; ``None`` where it has none.

    Raises:
        UsageError: They are invalid.
    """
    saved = read_model_settings(folder)
    if saved is None:
        return None
    path = folder / MODEL_SETTINGS
    fix = "Delete the file and pass the agent's settings with --agent-arg."
    option_names = {option.name for option in fields(PolicyOptions)}
    unknown = [name for name in saved.options if name not in option_names]
    if unknown:
        raise UsageError(f"{path} names the option {unknown[0]!r}, which agent 'lm' does not have. {fix}")
    options = dict(saved.options)
    template, parser = options.get("template", "plain"), options.get("parser", "raw")
    if not isinstance(template, str) or template not in TEMPLATES:
        # A path would let the author of the folder make the agent read any file.
        raise UsageError(
            f"{path}: template must be {' or '.join(TEMPLATES)} (the text of another is in template_text), "
            f"not {template!r}. {fix}"
        )
    if isinstance(parser, str) and len(parser) > PATTERN_CHARS:
        raise UsageError(f"{path}: parser has {len(parser)} characters, more than {PATTERN_CHARS}. {fix}")
    try:
        checked = PolicyOptions(**options)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except Exception as error:
        raise UsageError(
            f"{path} does not hold options of agent 'lm' ({type(error).__name__}). {fix}"
        ) from None
    if saved.template_text and "{instructions}" not in saved.template_text:
        raise UsageError(f"{path}: template_text has no {{instructions}} mark. {fix}")
    return SavedOptions(options=asdict(checked), template_text=saved.template_text, envs=tuple(saved.envs))


def model_settings(
    options: PolicyOptions, template_text: str, envs: list[tuple[str, dict[str, Any]]]
) -> ModelSettings:
    """Return the settings to save with a policy that was trained with these options."""
    values = asdict(options)
    is_named = options.template in TEMPLATES
    return ModelSettings(
        options=values if is_named else {**values, "template": "plain"},
        template_text="" if is_named else template_text,
        envs=[TrainedEnv(id=name, kwargs=kwargs) for name, kwargs in envs],
    )


def _default(option: Any) -> Any:
    return option.default_factory() if option.default is MISSING else option.default
