"""From a training config and a cluster to a simulated run, and to variants of it.

The device plan gives the times of updates, weight syncs and decoding steps (`rollgym.devices`), the config
the settings of the scheduler, and a recorded run or parametric latencies everything else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rollgym.config.loader import load
from rollgym.core.errors import UsageError
from rollgym.devices.candidates import Site
from rollgym.devices.cost_model import DeviceSpeed, decode_step, prompt_seconds, speed_of
from rollgym.devices.inventory import find_cluster
from rollgym.devices.planner import make_plan
from rollgym.devices.report import PlanReport, describe
from rollgym.devices.types import Cluster, Device, DeviceConfig
from rollgym.devices.workload import Job
from rollgym.rollout.config import SchedulerConfig
from rollgym.simulation.latencies import (
    Latencies,
    LatencyWords,
    ParametricLatencies,
    RecordedLatencies,
    read_latencies,
)
from rollgym.simulation.report import SimulationReport, Suggestion
from rollgym.simulation.scenario import EngineModel, Failures, LearnerTimes, Nodes, Scenario
from rollgym.simulation.simulate import (
    STEPS,
    VARIANT_STEPS,
    Level,
    Notify,
    Simulation,
    again,
    check_ticks,
    simulate,
)
from rollgym.trainer.cluster.workload import WhatIf, job_of, read_train_config
from rollgym.trainer.config import TrainConfig
from rollgym.trainer.scheduling import scheduler_settings

MAX_AT_ONCE = 1024
"""Most concurrent requests of an engine that are tabulated."""
STORAGE = 1e9
"""Bytes per second that a node of the learner writes to checkpoint storage."""
CHECKPOINT_BYTES = 12
"""Bytes per parameter in a checkpoint: weights and two moments in float32."""
LEAST_GAIN = 0.005
"""Variants with a smaller gain are not suggested."""
DAY = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What to simulate.

    Example:
        >>> SimulationRequest(config="frozen-lake-grpo", cluster="8xH100", what_if=WhatIf(model="7b"), days=1)
    """

    config: str
    """A YAML file or the name of a shipped config."""
    overrides: Sequence[str] = ()
    cluster: str | None = None
    """As in `find_cluster`. Default: this machine."""
    what_if: WhatIf = WhatIf()
    days: float = 1.0
    failures: Sequence[str] = ()
    """``node=4h``, ``engine_back=2m``: fields of `Failures`."""
    latencies: Sequence[str] = ()
    """A run folder, or ``turns=16``, ``step=2s``: fields of `LatencyWords`."""
    steps: int = STEPS
    """Representative steps."""
    level: Level = "auto"
    variants: bool = True
    """Whether to search for what to change."""
    check: bool = True
    """Whether to compare the tick level with the real scheduler at a reduced size."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.days <= 366):
            raise UsageError(f"days must be more than 0 and at most 366, not {self.days:g}.")
        if not 1 <= self.steps <= 1000:
            raise UsageError(f"steps must be 1 to 1000, not {self.steps}.")


def simulate_training(request: SimulationRequest, notify: Notify = lambda what: None) -> SimulationReport:
    """Simulate a training run, and variants of it.

    Args:
        request: The config, the cluster, failures and latencies.
        notify: Called with what is being simulated.

    Raises:
        UsageError: The config, the cluster, the latencies or the failures are invalid, or the run does not
            fit the cluster.

    Example:
        >>> report = simulate_training(SimulationRequest(config="frozen-lake-grpo", cluster="cpu:2"))
        >>> report.base.long.steps_per_day
    """
    config = read_train_config(request.config, request.overrides)
    maker = _ScenarioMaker(request, find_cluster(request.cluster))
    seconds = request.days * DAY
    notify("device plan")
    scenario, plan = maker.make(config)
    base = simulate(scenario, seconds, steps=request.steps, level=request.level, notify=notify)
    accuracy = check_ticks(scenario, notify) if request.check and base.level == "ticks" else None
    suggestions: list[Suggestion] = []
    if request.variants:
        search = _Search(request, maker, config, plan, base, notify)
        suggestions = list(search.suggestions())
    return SimulationReport(
        name=config.name or Path(request.config).stem,
        cluster=describe(plan.plan.cluster) if maker.planned else "this machine",
        days=request.days,
        base=base,
        plan=plan,
        accuracy=accuracy,
        suggestions=tuple(suggestions),
        tried=0 if not request.variants else search.tried,
        notes=tuple(_notes(scenario, config, base)),
    )


def _notes(scenario: Scenario, config: TrainConfig, base: Simulation) -> Iterator[str]:
    if config.rollout.pace_slow_groups and base.level == "ticks":
        yield "rollout.pace_slow_groups is not simulated at the tick level."
    if config.rollout.filter_zero_variance and not scenario.filtered:
        yield "No group is filtered for equal returns: a recorded run (--latencies) would tell how many are."
    if config.curriculum is not None or any(env.roles for env in config.envs):
        yield "Curricula and episodes with several roles are simulated as one environment with one agent."


def parse_failures(words: Sequence[str]) -> Failures:
    """Parse ``node=4h,engine=1d``."""
    return load(Failures, None, _split(words, "--failures", "node=4h"))


def parse_latencies(words: Sequence[str]) -> RecordedLatencies | LatencyWords:
    """Parse a run folder, or ``turns=16,step=2s``."""
    if len(words) == 1 and "=" not in words[0]:
        return read_latencies(Path(words[0]))
    return load(LatencyWords, None, _split(words, "--latencies", "a run folder, or turns=16"))


def _split(words: Sequence[str], option: str, expected: str) -> list[str]:
    parts = [part.strip() for word in words for part in word.split(",") if part.strip()]
    for part in parts:
        if "=" not in part:
            raise UsageError(f"{option} {part!r}: expected {expected}.")
    return parts


class _ScenarioMaker:
    """Makes the scenario of a config: the same latencies and failures for every variant."""

    def __init__(self, request: SimulationRequest, cluster: Cluster) -> None:
        self.request = request
        self.cluster = cluster
        self.latencies = parse_latencies(request.latencies)
        self.failures = parse_failures(request.failures)
        self._plans: dict[tuple[Job, DeviceConfig], PlanReport] = {}
        """Plans so far: many variants change nothing that a plan depends on."""

    @property
    def planned(self) -> bool:
        """Whether devices and their times come from a plan, or from a recorded run without a cluster."""
        return self.request.cluster is not None or not isinstance(self.latencies, RecordedLatencies)

    def job(self, config: TrainConfig) -> Job:
        """The models and the work of a step; with the length of replies, if that is given."""
        what_if = self.request.what_if
        job = job_of(config, self.cluster, replace(what_if, staleness=config.rollout.max_staleness))
        words = self.latencies
        if isinstance(words, LatencyWords) and words.reply is not None and words.turns is not None:
            whole = job.workload.prompt_tokens + job.workload.reply_tokens
            reply = min(whole - 1, round(words.turns * words.reply))
            work = replace(job.workload, reply_tokens=reply, prompt_tokens=max(1, whole - reply))
            job = replace(job, workload=work)
        return job

    def make(self, config: TrainConfig) -> tuple[Scenario, PlanReport]:
        """The scenario of a config and the plan behind it."""
        job = self.job(config)
        plan = self._plan(job, config.devices)
        site = Site(self.cluster)
        number_of = {device: number for number, device in enumerate(site.devices)}
        infer = plan.plan.placements["actor_infer"]
        speed = speed_of(site, [number_of[device] for device in infer.devices])
        scheduler = scheduler_settings(config)
        latencies = self._latencies(config, job, speed)
        recorded = latencies if isinstance(latencies, RecordedLatencies) else None
        engine = self._engine(plan, job, speed, scheduler, config)
        if recorded is not None:
            engine = EngineModel(engines=engine.engines, lent=engine.lent if self.planned else 0, free=True)
        scenario = Scenario(
            scheduler=scheduler,
            batch=config.rollout.groups,
            latencies=latencies,
            engine=engine,
            learner=self._learner(plan, job, config, recorded),
            nodes=self._nodes(plan),
            failures=self.failures,
            filtered=recorded.filtered if recorded is not None else 0.0,
            replays_log=bool(config.rollout.max_staleness) and config.tracking.episodes == "all",
            waits_for_node=config.devices.when_lost == "wait",
            trained_tokens=float(job.workload.prompt_tokens + job.workload.reply_tokens),
            layout=plan.plan.layout,
            seed=self.request.seed,
        )
        return scenario, plan

    def _plan(self, job: Job, devices: DeviceConfig) -> PlanReport:
        if (job, devices) not in self._plans:
            self._plans[job, devices] = make_plan(self.cluster, job, devices)
        return self._plans[job, devices]

    def _latencies(self, config: TrainConfig, job: Job, speed: DeviceSpeed) -> Latencies:
        words = self.latencies
        if isinstance(words, RecordedLatencies):
            return words
        work = job.workload
        turns = words.turns or max(1.0, round(work.reply_tokens / min(config.agent.max_tokens, work.context)))
        return ParametricLatencies(
            turns=turns,
            turns_sigma=words.turns_sigma,
            reply=words.reply or max(1.0, work.reply_tokens / turns),
            reply_sigma=words.reply_sigma,
            step=words.step,
            step_sigma=words.step_sigma,
            start=words.start,
            slow=words.slow,
            slow_factor=words.slow_factor,
            seconds_per_token=decode_step(job.actor, job.bytes_each, speed, 1, 1.0, 1.0),
        )

    def _engine(
        self, plan: PlanReport, job: Job, speed: DeviceSpeed, scheduler: SchedulerConfig, config: TrainConfig
    ) -> EngineModel:
        infer = plan.plan.placements["actor_infer"]
        size, work = infer.tensor_parallel, job.workload
        length = min(work.prompt_tokens + work.reply_tokens, work.context)
        limit = config.engine.max_batch if config.engine.kind == "embedded" else MAX_AT_ONCE
        most = max(1, min(plan.kv_tokens // length, limit, scheduler.max_in_flight, MAX_AT_ONCE))
        steps = [
            decode_step(job.actor, job.bytes_each, speed, size, float(max(count, 1)), length / 2)
            for count in range(most + 1)
        ]
        train = set(plan.plan.placements["actor_train"].devices)
        first = infer.devices[::size]
        return EngineModel(
            engines=len(first),
            lent=sum(device in train for device in first),
            step=tuple(steps),
            reading=prompt_seconds(job, speed, size) / work.reply_tokens,
        )

    def _learner(
        self, plan: PlanReport, job: Job, config: TrainConfig, recorded: RecordedLatencies | None
    ) -> LearnerTimes:
        spans = [span for span in plan.timeline if span.name not in ("generate", "sync weights")]
        train: tuple[float, ...] = (sum(span.end - span.start for span in spans),)
        sync: tuple[float, ...] = (
            sum(span.end - span.start for span in plan.timeline if span.name == "sync weights"),
        )
        if recorded is not None and recorded.train:
            train, sync = recorded.train, recorded.sync or sync
        nodes = len({device.node for device in plan.plan.placements["actor_train"].devices})
        size = CHECKPOINT_BYTES * job.actor.parameters
        return LearnerTimes(
            train=train,
            sync=sync,
            checkpoint=size / (nodes * STORAGE),
            checkpoint_every=config.checkpoints.every,
            evaluation_every=config.evaluation.every,
            evaluation_episodes=config.evaluation.episodes * len(config.envs),
        )

    def _nodes(self, plan: PlanReport) -> Nodes:
        placements = plan.plan.placements
        infer = placements["actor_infer"]
        trains = {d.node for role, held in placements.items() if role != "actor_infer" for d in held.devices}
        generates = {device.node for device in infer.devices}
        every = len(self.cluster.nodes)
        return Nodes(
            train=len(trains - generates),
            generate=len(generates - trains),
            both=len(trains & generates),
            environments=every - len(trains | generates),
            engines_each=len(infer.devices) / infer.tensor_parallel / len(generates),
            env_actors=every,
            cpus=sum(node.cpus for node in self.cluster.nodes),
            devices=len(self.cluster.devices),
            train_devices=len(placements["actor_train"].devices),
            engine_devices=len(infer.devices),
        )


@dataclass(frozen=True, slots=True)
class _Variant:
    kind: str
    """Variants of one kind exclude each other."""
    change: str
    overrides: tuple[str, ...]
    note: str = ""
    same_steps: bool = False
    """Whether the steps themselves stay as they are."""


class _Search:
    """Simulates variants of a config and ranks them by their gain."""

    def __init__(
        self,
        request: SimulationRequest,
        maker: _ScenarioMaker,
        config: TrainConfig,
        plan: PlanReport,
        base: Simulation,
        notify: Notify,
    ) -> None:
        self.request, self.maker, self.config = request, maker, config
        self.plan, self.base, self.notify = plan, base, notify
        self.tried = 0
        # Variants have fewer steps: the same groups, so that the difference is that of the change.
        short = replace(base, samples=base.samples[:VARIANT_STEPS])
        self.reference = again(short, base.scenario, request.days * DAY)

    def suggestions(self) -> Iterator[Suggestion]:
        """The variants, best first, and the best of each kind together."""
        variants = list(self._variants())
        found: list[tuple[_Variant, Suggestion]] = []
        for number, variant in enumerate(variants, 1):
            suggestion = self._try(variant, f"variant {number} of {len(variants)}, {variant.change}")
            if suggestion is not None:
                found.append((variant, suggestion))
        found.sort(key=lambda item: -item[1].gain)
        best: dict[str, _Variant] = {}
        for variant, suggestion in found:
            # More staleness or masks change what is trained; together, only what leaves the data as it is.
            if suggestion.gain >= LEAST_GAIN and not variant.note:
                best.setdefault(variant.kind, variant)
        suggestions = [suggestion for _, suggestion in found]
        if len(best) > 1:
            both = _Variant(
                "together",
                "; ".join(variant.change for variant in best.values()),
                tuple(word for variant in best.values() for word in variant.overrides),
            )
            together = self._try(both, "the best changes together")
            if together is not None:
                suggestions = sorted([*suggestions, together], key=lambda suggestion: -suggestion.gain)
        yield from suggestions

    def _try(self, variant: _Variant, what: str) -> Suggestion | None:
        self.notify(what)
        request, seconds = self.request, self.request.days * DAY
        try:
            config = read_train_config(request.config, [*request.overrides, *variant.overrides])
            if variant.same_steps:
                scenario = self._with_intervals(config)
            else:
                scenario, _ = self.maker.make(config)
        except UsageError:  # it does not fit the devices, or the settings exclude it
            return None
        if variant.same_steps:
            result = again(self.reference, scenario, seconds)
        else:
            result = simulate(
                scenario,
                seconds,
                steps=len(self.reference.samples),
                level=self.base.level,
                stretch=self.base.stretch,
                notify=lambda detail: self.notify(f"{what}: {detail}"),
            )
        self.tried += 1
        before, after = self.reference.long.useful_steps_per_day, result.long.useful_steps_per_day
        return Suggestion(
            change=variant.change,
            settings=variant.overrides,
            gain=after / before - 1.0 if before else 0.0,
            steps_per_day=self.base.long.useful_steps_per_day * after / before if before else 0.0,
            note=variant.note,
            result=result,
        )

    def _with_intervals(self, config: TrainConfig) -> Scenario:
        """The scenario of the run with the intervals of another config, which change no step."""
        scenario = self.base.scenario
        learner = replace(
            scenario.learner,
            checkpoint_every=config.checkpoints.every,
            evaluation_every=config.evaluation.every,
        )
        return replace(scenario, learner=learner)

    def _variants(self) -> Iterator[_Variant]:
        config, rollout = self.config, self.config.rollout
        yield from self._placements()
        bound = rollout.max_staleness
        for other in sorted({bound + 1, bound + 2, max(0, bound - 1)} - {bound}):
            overrides = [f"rollout.max_staleness={other}"]
            if not other:
                overrides += ["rollout.on_stale=wait", "rollout.pace_slow_groups=false"]
            note = "older tokens" if other > bound else ""
            yield _Variant("staleness", f"max_staleness {bound} -> {other}", tuple(overrides), note)
        if bound:
            notes = {"mask": "old tokens have no gradient", "replay": "", "wait": ""}
            for policy, note in notes.items():
                if policy != rollout.on_stale:
                    words = (f"rollout.on_stale={policy}",)
                    yield _Variant("on_stale", f"on_stale {rollout.on_stale} -> {policy}", words, note)
        surplus = {max(1, rollout.group_size // 8), max(1, rollout.group_size // 4)} - {rollout.oversample}
        for more in sorted(surplus):
            change = f"oversample {rollout.oversample} -> {more}"
            yield _Variant("oversample", change, (f"rollout.oversample={more}",), "prefers short episodes")
        most = rollout.groups * (rollout.group_size + rollout.oversample) * (bound + 1)
        for flight in sorted({min(most, 2 * rollout.max_in_flight), max(1, rollout.max_in_flight // 2)}):
            if flight != rollout.max_in_flight:
                change = f"max_in_flight {rollout.max_in_flight} -> {flight}"
                yield _Variant("in_flight", change, (f"rollout.max_in_flight={flight}",))
        every = config.checkpoints.every
        for other in sorted({max(1, every // 4), max(1, every // 2), 2 * every, 4 * every} - {every}):
            words = (f"checkpoints.every={other}",)
            change = f"checkpoint every {every} -> {other} steps"
            yield _Variant("checkpoints", change, words, same_steps=True)
        evaluation = config.evaluation.every
        if self.base.long.share("evaluation") > LEAST_GAIN:
            words = (f"evaluation.every={4 * evaluation}",)
            change = f"evaluation every {evaluation} -> {4 * evaluation} steps"
            yield _Variant("evaluation", change, words, same_steps=True)

    def _placements(self) -> Iterator[_Variant]:
        """Other layouts, and other shares of devices between learner and engines."""
        if not self.maker.planned:
            return
        config, plan = self.config, self.plan.plan
        pinned = any((config.devices.actor_train, config.devices.actor_infer))
        if not pinned:
            for layout in ("colocated", "split", "overlapping"):
                if layout != plan.layout and config.devices.layout == "auto":
                    word = f"devices.layout={layout}"
                    yield _Variant("devices", f"layout {plan.layout} -> {layout}", (word,))
        if pinned or plan.layout == "colocated":
            return
        train = plan.placements["actor_train"].devices
        every = len(set(train) | set(plan.placements["actor_infer"].devices))
        for part in (1 / 8, 1 / 16, -1 / 16, -1 / 8):
            count = self._whole_nodes(train, round(len(train) + part * every))
            if 0 < count < every and count != len(train):
                words = (
                    f"devices.layout={plan.layout}",
                    f"devices.actor_train={_first(plan.cluster, count)}",
                )
                change = f"learner on {len(train)} -> {count} devices, the others generate"
                yield _Variant("devices", change, words)

    def _whole_nodes(self, train: Sequence[Device], count: int) -> int:
        """A number of devices near this one that fills its nodes, unless there are few nodes."""
        sizes = Counter(device.node for device in self.maker.cluster.devices)
        each = max(sizes.values())
        return count if len(sizes) < 4 else each * max(1, round(count / each))


def _first(cluster: Cluster, count: int) -> str:
    kind = cluster.nodes[cluster.devices[0].node].kind
    return f"{kind}[0-{count - 1}]" if count > 1 else f"{kind}[0]"
