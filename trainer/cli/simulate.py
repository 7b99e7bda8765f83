"""``rollgym simulate``: a training run in virtual time, and what to change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from rollgym.core.errors import UsageError, os_reason
from rollgym.trainer.cli.options import Name, Words, name_and_words
from rollgym.trainer.cli.plan import ClusterWords, Model, Staleness, Tokens
from rollgym.utils.cli_options import AsJson, EnvModules, console, import_modules, needs_extra
from rollgym.utils.cli_output import print_json

EPILOG = (
    "Example: rollgym simulate sokoban-grpo agent.history=full learner.gradient_checkpointing=true "
    "engine.kind=sglang --model 7b --tokens 8192 --cluster 4x8xH100 --staleness 1 --days 7 "
    "--failures node=12h,engine=6h --latencies turns=8,step=2s"
)
LINE_SECONDS = 10.0
"""Seconds between two lines of progress where stderr is not a terminal."""

Days = Annotated[float, typer.Option("--days", help="Days of training, failures included.")]
FailureWords = Annotated[
    list[str] | None,
    typer.Option(
        "--failures",
        metavar="KIND=TIME",
        help="Mean time between failures in the whole run: node, engine, env, learner, straggler; and until "
        "they are back: node_back, ... Separated by commas or repeated: node=4h,engine=1d,node_back=30m.",
    ),
]
LatencyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--latencies",
        metavar="RUN|KEY=VALUE",
        help="A run folder whose recorded latencies are used; or turns, reply, step, slow and others, such "
        "as turns=16,reply=512,step=2s.",
        show_default="parametric, from the plan",
    ),
]
Steps = Annotated[int, typer.Option("--steps", help="Representative steps that are simulated in detail.")]
LevelOption = Annotated[
    str,
    typer.Option(
        "--level", help="Detail of these: events (real scheduler), ticks, or auto: events if that is quick."
    ),
]
Variants = Annotated[
    bool, typer.Option("--variants/--no-variants", help="Also simulate variants, to say what to change.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of latencies and failures.", min=0)]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write a picture.")]


def simulate(
    config: Name = None,
    settings: Words = None,
    cluster: ClusterWords = None,
    model: Model = None,
    tokens: Tokens = None,
    staleness: Staleness = None,
    days: Days = 1.0,
    failures: FailureWords = None,
    latencies: LatencyOption = None,
    steps: Steps = 12,
    level: LevelOption = "auto",
    variants: Variants = True,
    seed: Seed = 0,
    svg: Svg = None,
    as_json: AsJson = False,
    env_module: EnvModules = None,
) -> None:
    """Simulate a training run: utilization, throughput, lost work, staleness, and what to change.

    Starts nothing, and the devices of --cluster need not exist. A few steps run in virtual time, with the
    real scheduler or, for large runs, a faster model that is compared with it; days of steps with failures
    are drawn from them.
    """
    config, words = name_and_words(config, settings)
    import_modules(env_module)
    with needs_extra("Simulating a training run", "train"):
        from rollgym.simulation.report import render_svg, render_text
        from rollgym.simulation.simulate import LEVELS
        from rollgym.trainer.cluster.workload import WhatIf
        from rollgym.trainer.simulation import SimulationRequest, simulate_training
    if config is None:
        raise UsageError("No config given: pass a YAML file or a name from `rollgym config list`.")
    chosen = next((name for name in LEVELS if name == level), None)
    if chosen is None:
        raise UsageError(f"--level {level!r} is not one of {', '.join(LEVELS)}.")
    if staleness is not None:
        words = [*words, f"rollout.max_staleness={staleness}"]
    request = SimulationRequest(
        config=config,
        overrides=words,
        cluster=cluster,
        what_if=WhatIf(model=model, tokens=tokens),
        days=days,
        failures=failures or (),
        latencies=latencies or (),
        steps=steps,
        level=chosen,
        variants=variants,
        seed=seed,
    )
    with _progress() as notify:
        report = simulate_training(request, notify)
    if svg is not None:
        try:
            svg.write_text(render_svg(report), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"Cannot write the image to {svg}: {os_reason(error)}.") from error
    if as_json:
        print_json(report.to_json())
    else:
        render_text(console(), report)


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """Progress: a status line in a terminal, a line now and then elsewhere."""
    screen = console(stderr=True)
    if screen.is_terminal:
        with screen.status("simulating") as status:
            yield lambda what: status.update(what)
        return
    last = time.monotonic()

    def line(what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"simulating: {what}", file=sys.stderr, flush=True)

    yield line
