"""Names that 0.2.0 renamed: an error states the new name, and nothing is forwarded.

`RenamedModules` is a finder on ``sys.meta_path``, `rollgym.__getattr__` uses `NAMES`, and readers of metrics
use `METRICS`.
"""

from __future__ import annotations

import importlib.abc
from collections.abc import Sequence
from types import ModuleType

SINCE = "0.2.0"


def _table(text: str) -> dict[str, str]:
    return dict(row.split("=") for row in text.split())


NAMES = _table("Move=AgentAction Reply=StepResult agent_cards=list_agents cards=list_envs check_env=check")
"""Names in ``rollgym`` itself."""

_MODULES = """
adapt=adapters.gymnasium adapt_facts=adapters.gymnasium agent=core.agent
agents.chat_options=agents.chat.options agents.credentials=agents.chat.credentials
agents.dialogue=agents.prompt_builder agents.endpoint=agents.chat.endpoint agents.lm=agents.policy.agent
agents.lm_options=agents.policy.options agents.ratelimit=agents.chat.rate_limit
agents.wire=agents.chat.openai_protocol cli.common=utils.cli_options cli.config=trainer.cli
cli.model=trainer.cli cli.output=utils.cli_output cli.plan=trainer.cli cli.shop=envs.webshop.cli
cli.train=trainer.cli cluster.mail=cluster.rpc cluster.workers=cluster.worker_group
command_line=utils.command_line comparison=evaluation.compare config_explain=config.explain
config_messages=config.errors config_source=config.loader config_types=config.settings config_yaml=config.yaml
deadline=core.deadline engines.replicas=engines.router engines.torch=engines.embedded.engine
envs.code.box=envs.code.sandbox_handle envs.sokoban.board=envs.sokoban.game
envs.webshop.catalogue=envs.webshop.catalog envs.webshop.command=envs.webshop.manage errors=core.errors
evalplan=evaluation.plan extras=core.extras failures=core.failures files=core.files folders=io.atomic
foreign_env=adapters.duck_typed gguf_folder=models.gguf given=core.local_objects hub=models.zoo
model_settings=models.policy_settings pretrained=models.zoo records=core.serialization
registry=core.registry replay=evaluation.replay rewards.address=rewards.http
rewards.hosted=rewards.reward_env rewards.ready=rewards.builtin rewards.weighted=rewards.composite
run_warnings=evaluation.run_warnings running=utils.async_runner sandbox.open=sandbox.factory
scheduler=rollout seeding=core.seeding signals=utils.signals spaces_text=adapters.spaces
stats=evaluation.stats store=io.run_dir summary=evaluation.metrics tasks=core.tasks terminal=utils.terminal
terminal_rich=utils.rich_console trainer.batch=trainer.data trainer.checkpoint=trainer.tracking
trainer.command=trainer.main trainer.console=trainer.tracking trainer.corpus=trainer.builtin_policy
trainer.credit=trainer.advantages trainer.experience=trainer.data trainer.handover=trainer.colocation
trainer.journal=trainer.tracking trainer.kl=trainer.losses trainer.loss_settings=trainer.losses
trainer.mistakes=trainer.imitation trainer.model=trainer.builtin_policy trainer.packing=trainer.data
trainer.planning=trainer.cluster trainer.ray_plan=trainer.cluster trainer.ray_roles=trainer.cluster
trainer.retell=trainer.imitation trainer.rows=trainer.data trainer.run=trainer.train_run
trainer.setup=trainer.runtime trainer.setup_ray=trainer.cluster trainer.shaping=trainer.reward_shaping
trainer.tokenizer=trainer.builtin_policy trainer.warm_start=trainer.imitation
trainer.weighting=trainer.losses trust=core.trust types=core.types versions=utils.env_info
web=utils.http_server
"""

MODULES = {f"rollgym.{old}": f"rollgym.{new}" for old, new in _table(_MODULES).items()} | {
    "rollgym.check": "rollgym.check(env), or rollgym.checks for its rules and report types",
    "rollgym.evaluate": "rollgym.evaluate(env, agent), or rollgym.evaluation",
    "rollgym.text": "rollgym.core.env (Reply is now StepResult, TextFace is now TextInterface)",
}
"""Modules by their full old name."""

METRICS = _table("""
advantage_largest=advantage_abs_max credit_advantage_largest=advantage_abs_max
credit_advantage_mean=advantage_mean credit_advantage_std=advantage_std credit_cut_short=truncated_frac
credit_groups=groups credit_groups_of_one=singleton_group_frac
credit_groups_without_variance=zero_std_group_frac credit_score_mean=score_mean
credit_shared_state_frac=shared_state_frac credit_shared_states=shared_states
credit_turns_per_shared_state=turns_per_shared_state cut_short=truncated_frac
groups_of_one=singleton_group_frac groups_without_variance=zero_std_group_frac
handover_offloaded=colocation_offloaded_bytes handover_released=colocation_released_bytes
handover_reloaded=colocation_reloaded_bytes handover_seconds=colocation_seconds
importance_capped=tis_clip_frac logprob_gap=train_rollout_logprob_diff
logprob_gap_max=train_rollout_logprob_diff_max logprob_gap_stale=stale_logprob_diff
""")


def renamed(old: str, new: str) -> str:
    """The sentence of every error here."""
    return f"{old} was renamed in {SINCE}: use {new}"


class RenamedModules(importlib.abc.MetaPathFinder):
    """Raises for modules of `MODULES`.

    It stands first on ``sys.meta_path``: a folder that an upgrade left behind with nothing but compiled files
    in it would otherwise import as an empty namespace package.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Raise `ModuleNotFoundError` with the new name for a module that was renamed."""
        if fullname in MODULES:
            raise ModuleNotFoundError(renamed(fullname, MODULES[fullname]), name=fullname)
