"""The modules of a learner: policy, critic and reference, each with one `forward` for a strategy to wrap."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollgym.engines.embedded.offload import trim_memory
from rollgym.engines.embedded.precision import choose_dtype
from rollgym.trainer.data.sequences import TokenSequence
from rollgym.trainer.learner.config import LearnerConfig, LearnerOptions
from rollgym.trainer.learner.forward import (
    Layout,
    distinct,
    has_plain_head,
    parts,
    score,
    states,
    top_logprobs,
)
from rollgym.trainer.learner.layout import LayoutChoice, choose_layout, force_layout, known_layout, use_layout
from rollgym.trainer.learner.lean_modules import WeightCasts, make_lean, shrink_frozen
from rollgym.trainer.learner.lora import add_lora
from rollgym.trainer.learner.process_group import ProcessGroup
from rollgym.trainer.learner.router_replay import RouterReplay, make_router_replay
from rollgym.trainer.learner.sharded_loading import (
    ModelSource,
    Owners,
    load_model,
    parameter_owners,
    source_of,
)

Outputs = Literal["scores", "values", "both"]
"""What a policy module computes: log-probs and entropy, values, or all three."""


def mixed_precision(device: str, bfloat16: bool) -> torch.autocast:
    """Compute in bfloat16, or in the dtype of the weights.

    Without autocast's cache, which would hold copies of all layers at once; each is needed once in a pass.
    """
    return torch.autocast(device, torch.bfloat16, enabled=bfloat16, cache_enabled=False)


class Critic(nn.Module):
    """A zero-initialized value head on the policy's hidden states, or on a copy of its transformer's."""

    def __init__(self, policy: Any, *, separate: bool, device: torch.device | None = None) -> None:
        super().__init__()
        body, head = parts(policy)
        width = head.weight.shape[1]
        self.body: Any = copy.deepcopy(body) if separate else None
        self.head = nn.Linear(width, 1, device=device or head.weight.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def from_states(self, hidden: Tensor) -> Tensor:
        """Return values from the policy's hidden states."""
        # In float32 even where the states are computed in bfloat16, which rounds a value near 1 to 1/128.
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden.float())
        return values[:, 0]

    def before(self, rows: Sequence[TokenSequence], policy_body: Any, layout: Layout) -> Tensor:
        """Return values before each action token of rows."""
        body = policy_body if self.body is None else self.body
        once, again = distinct(rows)
        values = self.from_states(states(body, once, layout, self.head.weight.device))
        return values[torch.from_numpy(again).to(values.device)]


class PolicyModule(nn.Module):
    """A policy, with the critic if that is a head on its hidden states."""

    def __init__(
        self,
        model: Any,
        critic: Critic | None,
        *,
        layout: Layout,
        temperature: float,
        bfloat16: bool,
        chunk_logits: bool,
        casts: WeightCasts | None = None,
    ) -> None:
        super().__init__()
        self.model, self.critic = model, critic
        self._casts = casts
        self._layout: Layout = layout
        self._temperature, self._bfloat16, self._chunk_logits = temperature, bfloat16, chunk_logits
        self.training = False

    def forward(self, rows: Sequence[TokenSequence], outputs: Outputs) -> tuple[Tensor, ...]:
        """Return log-probs and entropy of the action tokens, the values before them, or all three."""
        body, head = parts(self.model)
        with mixed_precision(head.weight.device.type, self._bfloat16):
            if outputs == "values":
                assert self.critic is not None
                return (self.critic.before(rows, body, self._layout).clone(),)
            scores = score(
                self.model,
                rows,
                layout=self._layout,
                temperature=self._temperature,
                chunk_logits=self._chunk_logits,
                casts=self._casts,
            )
            # Copies: backward hooks of a view are lost when the view is written to.
            if outputs == "scores":
                return scores.logprobs.clone(), scores.entropy.clone()
            assert self.critic is not None
            values = self.critic.from_states(scores.hidden)
            return scores.logprobs.clone(), scores.entropy.clone(), values.clone()

    def top(self, rows: Sequence[TokenSequence], k: int) -> tuple[Tensor, Tensor]:
        """Return the ``k`` highest log-probs before each action token, and their token ids, both [N, k]."""
        with mixed_precision(parts(self.model)[1].weight.device.type, self._bfloat16):
            return top_logprobs(self.model, rows, k, layout=self._layout, temperature=self._temperature)


class CriticModule(nn.Module):
    """A separate critic; it also takes the place of a policy where nothing else is trained."""

    critic = None
    """Unlike a `PolicyModule`, it has no head besides its own."""

    def __init__(self, value_model: Critic, *, layout: Layout, bfloat16: bool) -> None:
        super().__init__()
        self.value_model = value_model
        self._layout: Layout = layout
        self._bfloat16 = bfloat16
        self.training = False

    def forward(self, rows: Sequence[TokenSequence], outputs: Outputs = "values") -> tuple[Tensor, ...]:
        """Return the values before the action tokens, the only output of this module."""
        with mixed_precision(self.value_model.head.weight.device.type, self._bfloat16):
            return (self.value_model.before(rows, None, self._layout).clone(),)


class TrainedModules:
    """Policy, critic and reference of a learner on its device, before a strategy wraps them.

    Args:
        model: A model folder, a model, or a source of one.
        config: The learner's.
        options: The learner's.
        device: The learner's.
        group: The ranks, which must agree on a layout.
        reference: Keep a frozen copy of the policy.
        on_meta: Build without weights; the strategy calls `load_weights` after sharding. For a model folder
            in safetensors format; any other model is whole at first.
        autocast: Compute in bfloat16 by autocast, if at all; else the strategy casts the weights.
    """

    def __init__(
        self,
        model: nn.Module | Path | ModelSource,
        config: LearnerConfig,
        options: LearnerOptions,
        device: torch.device,
        group: ProcessGroup | None,
        *,
        reference: bool,
        on_meta: bool = False,
        autocast: bool = True,
    ) -> None:
        self._config, self._temperature, self._device = config, options.temperature, device
        self._on_meta = on_meta
        self._owners: list[Owners] = []
        self._bodies: list[nn.Module] = []
        self._source: ModelSource | None = None
        """Source of weights that are loaded after sharding; ``None``: the model has them from the start."""
        self._given = model if not isinstance(model, nn.Module | Path) else None
        plain: Any
        if options.share_model:
            plain = model
        elif isinstance(model, nn.Module):
            plain = load_model(model, device)
        else:
            source = source_of(model) if on_meta and isinstance(model, Path) else self._given
            self._source = source if on_meta else None
            if self._source is not None:
                plain = self._source.build()
            else:
                plain = load_model(model, device) if isinstance(model, Path) else model.load_whole(device)
        self._reference_source = self._source
        self.parameters = sum(parameter.numel() for parameter in plain.parameters())
        """Number of the policy's parameters, trained or not."""
        self.dtype = choose_dtype(config.dtype, device, self.parameters)
        if group is not None and len(set(group.gather(str(self.dtype)))) > 1:
            self.dtype = torch.float32  # `auto` is measured: unlike machines would compute differently
        """The compute dtype; weights are float32."""
        self.layout, self._chunk_logits = self._check(plain, options, group)
        bfloat16 = autocast and self.dtype == torch.bfloat16
        self._module_options: Any = {"layout": self.layout.layout, "bfloat16": bfloat16}
        self.reference_model: Any = copy.deepcopy(plain).requires_grad_(False) if reference else None
        self.value_only = options.value_only
        self.critic: Critic | None = None
        """Trained beside the policy; a value-only learner's critic is its `model`."""
        if config.critic != "none" and not self.value_only:
            self.critic = Critic(plain, separate=config.critic == "separate", device=device)
        self._note_owners(plain)
        self.model: Any = plain if config.lora is None else add_lora(plain, config.lora, device)
        """Trained module: a transformers or peft model, or a `Critic`."""
        if self.value_only:
            self.model = Critic(plain, separate=True, device=device)
            self._note_body(plain, self.model)
        elif config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
            for module in self.model.modules():
                # transformers keeps all activations unless in training mode; dropout must stay off.
                module.training = getattr(module, "gradient_checkpointing", False)
        self.weight_casts: WeightCasts | None = None
        """Of a policy that computes in bfloat16 on a CPU, in one process: its weights are cast once."""
        if device.type == "cpu" and self.dtype == torch.bfloat16 and group is None and not self.value_only:
            self.weight_casts = make_lean(self.model)
            if config.lora is not None and not options.share_model:
                shrink_frozen(self.model)
                trim_memory(device)
        self.separate_critic: CriticModule | None = None
        if self.critic is not None and self.critic.body is not None:
            self.separate_critic = CriticModule(self.critic, **self._module_options)
        self.policy: PolicyModule | CriticModule
        if self.value_only:
            self.policy = CriticModule(self.model, **self._module_options)
        else:
            critic = None if self.separate_critic else self.critic
            self.policy = self._policy_module(self.model, critic, self.weight_casts)
        self.router_replay: RouterReplay | None = None
        """Of a policy with experts, unless it is turned off."""
        if not self.value_only:
            self.router_replay = make_router_replay(self.plain_model, self.body, config.router_replay)

    @property
    def plain_model(self) -> Any:
        """The transformers model of the policy, without adapters."""
        return self.model.get_base_model() if self._config.lora is not None else self.model

    @property
    def body(self) -> Any:
        """The transformer of the policy, or of a value-only learner's critic."""
        return self.model.body if self.value_only else parts(self.model)[0]

    def load_reference(self, model: Path) -> None:
        """Read another reference policy."""
        source = source_of(model) if self._on_meta else None
        self._reference_source = source
        if source is None:
            self.reference_model = load_model(model, self._device).requires_grad_(False)
            use_layout(self.reference_model, self.layout.layout)
        else:
            self.reference_model = source.build().requires_grad_(False)
            force_layout(self.reference_model, self.layout.layout)

    def _note_owners(self, plain: Any) -> None:
        """Note which parameters are read into the policy, before adapters rename them, and into a critic."""
        if not self.value_only:
            self._owners.append(parameter_owners(plain))
            self._bodies.append(plain)
        critic = self.critic
        if critic is not None and critic.body is not None:
            self._note_body(plain, critic)

    def _note_body(self, plain: Any, critic: Critic) -> None:
        inside = next(name for name, module in plain.named_modules() if module is parts(plain)[0])
        self._owners.append(parameter_owners(critic.body, f"{inside}."))
        self._bodies.append(critic.body)

    def load_weights(self, device: torch.device) -> None:
        """Read the weights of a policy and critic that were built without, after they were sharded."""
        if self._source is not None:
            for owners, body in zip(self._owners, self._bodies, strict=True):
                self._source.load(owners, body, device)

    def load_reference_weights(self, device: torch.device) -> None:
        """Read the weights of a reference policy that was built without, after it was sharded."""
        if self._reference_source is not None and self.reference_model is not None:
            owners = parameter_owners(self.reference_model)
            self._reference_source.load(owners, self.reference_model, device)

    def reference_module(self) -> PolicyModule | None:
        """Return a module of the reference policy, not wrapped yet."""
        if self.reference_model is None:
            return None
        return self._policy_module(self.reference_model, None).requires_grad_(False)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter by its name in checkpoints, in the optimizer's order."""
        parameters = {f"model.{n}": p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.critic is not None:
            parameters |= {f"critic.{n}": p for n, p in self.critic.named_parameters()}
        return parameters

    def all_parameters(self) -> list[Tensor]:
        """Return every parameter of policy, critic and reference, once."""
        models = [self.model, self.critic, self.reference_model]
        parameters = (p for model in models if model is not None for p in model.parameters())
        return list(dict.fromkeys(parameters))

    def param_groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for an optimizer: the policy's, then the critic's.

        ``base`` is the learning rate that the schedule scales.
        """
        rate, critic_rate = self._config.learning_rate, self._config.critic_rate
        critic_rate = rate if critic_rate is None else critic_rate
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        groups = [{"params": trained, "base": critic_rate if self.value_only else rate}]
        if self.critic is not None:
            groups.append({"params": list(self.critic.parameters()), "base": critic_rate})
        return [{**group, "lr": group["base"]} for group in groups]

    def own_routing(self) -> AbstractContextManager[None]:
        """Return a context in which routers choose experts themselves."""
        return nullcontext() if self.router_replay is None else self.router_replay.paused()

    def keep_casts(self) -> AbstractContextManager[None]:
        """Return a context in which weights do not change, so that each is cast once."""
        return nullcontext() if self.weight_casts is None else self.weight_casts.keep()

    def _check(
        self, plain: Any, options: LearnerOptions, group: ProcessGroup | None
    ) -> tuple[LayoutChoice, bool]:
        """Choose the layout of rows, and whether logits may be computed in chunks."""
        asked = self._config.layout
        source = self._source or self._given
        if source is None:
            choose = known_layout if options.share_model else choose_layout
            return choose(plain, asked).agree(group), has_plain_head(plain)
        choice, plain_head = source.check(asked, self._device)
        choice = choice.agree(group)
        force_layout(plain, choice.layout)
        return choice, plain_head

    def _policy_module(
        self, model: Any, critic: Critic | None, casts: WeightCasts | None = None
    ) -> PolicyModule:
        return PolicyModule(
            model,
            critic,
            temperature=self._temperature,
            chunk_logits=self._chunk_logits,
            casts=casts,
            **self._module_options,
        )
