"""``rollgym check tokens``: check a model's chat template for token-level conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgym.chat import ChatTemplate, Conversation, load_tokenizer
from rollgym.chat.tokenizer import MIDDLE
from rollgym.core.errors import UsageError
from rollgym.core.messages import Message, ToolCall, ToolSpec
from rollgym.utils.cli_options import print_result

if TYPE_CHECKING:
    from rich.console import Console

SYSTEM = "You play a game."
TOOL = ToolSpec(
    name="open",
    description="Open something.",
    parameters={"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
)
CALL = ToolCall(name="open", arguments={"thing": "door"})
EXCHANGES = (("The door is shut.", "Open it"), ("It opens.", "Go in"))


def check_tokens(
    model: Path, as_json: bool, *, date: str | None = None, chat_kwargs: Mapping[str, Any] | None = None
) -> int:
    """Explain the chat template of a model folder, and return the exit code.

    0 if conversations can be continued in token ids, 1 if not; a folder without a tokenizer raises
    `UsageError`.
    """
    tokenizer = load_tokenizer(model)
    try:
        template = ChatTemplate(tokenizer, chat_kwargs, date=date)
        report = {"ok": True, "model": str(model), **explain(template)}
    except UsageError as error:
        report = {"ok": False, "model": str(model), "problem": str(error)}
    print_result(report, as_json, _print)
    return 0 if report["ok"] else 1


def explain(template: ChatTemplate) -> dict[str, Any]:
    """Properties of the template as plain values, with an example of two turns."""
    facts = template.facts
    return {
        "end_of_turn": facts.end_of_turn,
        "end_of_turn_id": facts.end_of_turn_id,
        "stop_ids": list(facts.stop_ids),
        "separator": facts.separator,
        "generation_prompt": facts.generation_prompt,
        "before_reply": facts.lead,
        "system_role": facts.system_role,
        "rewrites": [asdict(rewrite) for rewrite in facts.rewrites],
        "control_tokens": len(template.controls),
        "observations": _try_injection(template),
        "turns_marked": facts.marked,
        "tools": _explain_tools(template),
        "example": example(template),
        "tool_example": tool_example(template),
    }


def example(template: ChatTemplate) -> list[dict[str, Any]]:
    """Two turns, part by part: the ids of the template and of the policy."""
    parts = _Parts(template)
    talk = Conversation(template, system=SYSTEM)
    for observation, answer in EXCHANGES:
        talk.observe(observation)
        text = template.facts.lead + answer + template.facts.tail
        parts.add_turn(talk, text, talk.stop_ids[:1])
    return parts.parts


def tool_example(template: ChatTemplate) -> list[dict[str, Any]]:
    """A tool call, its result and a reply, part by part."""
    parts = _Parts(template)
    talk = Conversation(template, system=SYSTEM, tools=[TOOL])
    talk.observe(EXCHANGES[0][0])
    end = template.tools.end_id if template.tools.native else None
    stop = talk.stop_ids[:1] if end is None else (end,)
    parts.add_turn(talk, template.call_text([CALL], [TOOL]), stop)
    talk.observe([Message(role="tool", content=EXCHANGES[1][0], name=TOOL.name)])
    parts.add_turn(talk, template.facts.lead + EXCHANGES[1][1] + template.facts.tail, talk.stop_ids[:1])
    return parts.parts


class _Parts:
    """The parts of an example conversation: its row, who wrote it, its mask, ids and text."""

    def __init__(self, template: ChatTemplate) -> None:
        self.parts: list[dict[str, Any]] = []
        self._codec = template.codec
        self._row = 1

    def add_turn(self, talk: Conversation, reply: str, stop_ids: tuple[int, ...]) -> None:
        """Add what the template wrote since the last reply, and a reply."""
        self._row += talk.new_row
        self._add("template", 0, talk.added_ids)
        sampled = (*self._codec.encode([reply], MIDDLE), *stop_ids)
        talk.reply(sampled)
        self._add("policy", 1, sampled)

    def _add(self, who: str, mask: int, ids: tuple[int, ...]) -> None:
        text = self._codec.decode(ids)
        self.parts.append({"row": self._row, "who": who, "mask": mask, "ids": list(ids), "text": text})


def _explain_tools(template: ChatTemplate) -> dict[str, Any]:
    facts = template.tools
    return {
        "format": facts.format.name,
        "native": facts.native,
        "reason": facts.reason,
        "parallel_calls": facts.parallel,
        "stop_ids": list(facts.stop_ids),
        "call": template.call_text([CALL], [TOOL]),
    }


def _try_injection(template: ChatTemplate) -> str:
    """The handling of control tokens that an observation spells out: ``text`` or ``refused``."""
    try:
        Conversation(template).observe(" ".join(template.controls))
    except UsageError:
        return "refused"
    return "text"


def _print(screen: Console, report: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    if not report["ok"]:
        screen.print(f"[bold red]✗[/] {escape(report['problem'])}", highlight=False, soft_wrap=True)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, text in _lines(report):
        table.add_row(name, escape(text))
    screen.print(table, highlight=False)
    screen.print("\nTwo turns, part by part (the policy is trained on mask 1):")
    for title, name in (("", "example"), ("\nThe same with a tool call and its result:", "tool_example")):
        parts = Table("row", "written by", "mask", "ids", "text", box=None, pad_edge=False)
        for part in report[name]:
            ids = " ".join(map(str, part["ids"]))
            parts.add_row(str(part["row"]), part["who"], str(part["mask"]), ids, escape(repr(part["text"])))
        if title:
            screen.print(title)
        screen.print(parts, highlight=False)
    screen.print("\n[bold green]✓[/] [bold]Conversations can be continued in token ids.[/]")


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    end = f"{report['end_of_turn']!r} (id {report['end_of_turn_id']})"
    system = (
        "a separate message"
        if report["system_role"]
        else "none: its text is prepended to the first user message"
    )
    kept = "kept unchanged: one training sequence per episode"
    changes = [
        f"{r['what']} is rewritten, which starts a new training sequence ({r['difference']})"
        for r in report["rewrites"]
    ]
    outcome = {
        "text": "control tokens spelled out in an observation stay text",
        "refused": "an observation that spells out a control token is refused",
    }
    marks = "" if report["turns_marked"] else "; but turns are marked with plain text, which can be imitated"
    lines = [
        ("end of turn", end if report["end_of_turn"] else "no separate token"),
        ("stop ids", ", ".join(map(str, report["stop_ids"])) or "none: replies end at max_tokens"),
        ("separator", repr(report["separator"])),
        ("generation prompt", repr(report["generation_prompt"])),
        ("before a reply", repr(report["before_reply"])),
        ("system message", system),
        ("history", "\n".join(changes) or kept),
        (
            "observations",
            f"{outcome[report['observations']]} ({report['control_tokens']} such tokens){marks}",
        ),
        ("tools", _tools_line(report["tools"])),
        ("tool call", repr(report["tools"]["call"])),
    ]
    return [line for line in lines if line[0] != "before a reply" or report["before_reply"]]


def _tools_line(tools: Mapping[str, Any]) -> str:
    if not tools["native"]:
        return f"described in the system message, calls in the form {tools['format']}: {tools['reason']}"
    several = "" if tools["parallel_calls"] else ", one call per turn"
    return f"rendered by the template, calls in the form {tools['format']}{several}"
