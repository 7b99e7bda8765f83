"""Tasks on logs: count errors, read access logs, measure requests."""

from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollgym.envs.terminal.families.base import (
    SERVICES,
    WORDS,
    Draft,
    Kind,
    Rng,
    answer,
    integer,
    pick,
    sample,
    sentence,
    unchanged,
)
from rollgym.envs.terminal.types import Tree, file

Line = tuple[str, str, str, str]
"""Time, level, service, message."""


def _times(rng: Rng, count: int) -> list[str]:
    """Ascending times of one day."""
    seconds = sorted(int(second) for second in rng.choice(86_400, size=count, replace=False))
    day = f"2026-{integer(rng, 1, 12):02d}-{integer(rng, 1, 28):02d}"
    return [f"{day} {each // 3600:02d}:{each // 60 % 60:02d}:{each % 60:02d}" for each in seconds]


def _errors(rng: Rng, level: int) -> Draft:
    target = f"{pick(rng, WORDS)}.txt"
    services = sample(rng, SERVICES, integer(rng, 3, 6))
    lines: list[Line] = []
    for time in _times(rng, integer(rng, 40, 80 * level)):
        message = sentence(rng, 2, 5)
        # Decoys: the name of the level in a message.
        message += " after ERROR" if rng.random() < 0.15 else ""
        lines.append((time, pick(rng, ("INFO", "INFO", "WARN", "ERROR")), pick(rng, services), message))
    lines.append((lines[-1][0], "ERROR", services[0], sentence(rng, 2, 5)))
    given: dict[str, Any] = {"target": target, "level": level}
    texts = [" ".join(line) + "\n" for line in lines]
    tree: Tree = {"logs/app.log": file("".join(texts))}
    errors = [line for line in lines if line[1] == "ERROR"]
    task = f"Count its lines of the level ERROR, and write the number to the file {target}."
    expected = str(len(errors))
    if level == 2:
        task = (
            "Count the lines of the level ERROR of each service. Write a line `service count` for every "
            "service "
            f"that has any to the file {target}, the highest count first and services with the same count in "
            "alphabetical order."
        )
        counts = Counter(line[2] for line in errors)
        ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
        expected = "\n".join(f"{service} {count}" for service, count in ranked)
    what = "The file logs/app.log is a log"
    if level == 3:
        cuts = sorted(sample(rng, range(5, len(texts) - 5), 2))
        parts = ["".join(texts[: cuts[0]]), "".join(texts[cuts[0] : cuts[1]]), "".join(texts[cuts[1] :])]
        tree = {
            "logs/app.log.2.gz": file(gzip.compress(parts[0].encode(), mtime=0)),
            "logs/app.log.1": file(parts[1]),
            "logs/app.log": file(parts[2]),
        }
        first, last = sorted(lines[int(at)][0] for at in rng.choice(len(lines), size=2, replace=False))
        service = pick(rng, services)
        given |= {"service": service, "first": first, "last": last}
        what = "The folder logs holds a log in three files, the older ones app.log.1 and app.log.2.gz"
        task = (
            f"Count the lines of the level ERROR of the service {service} with a time from {first} to "
            f"{last} (both "
            f"included) in all three files together, and write the number to the file {target}."
        )
        expected = str(sum(line[2] == service and first <= line[0] <= last for line in errors))
    return Draft(
        instruction=f"{what}. Each line has a date, a time, a level, a service and a message. {task}",
        parameters=given,
        tree=tree,
        checks=[answer(target, expected), *unchanged(tree, sorted(tree))],
    )


def _solve_errors(given: Mapping[str, Any]) -> list[str]:
    target = given["target"]
    if given["level"] == 1:
        work = "awk '$3 == \"ERROR\" { count++ } END { print count + 0 }' logs/app.log"
    elif given["level"] == 2:
        work = "awk '$3 == \"ERROR\" { print $4 }' logs/app.log | sort | uniq -c"
        work += " | LC_ALL=C sort -k1,1nr -k2,2 | awk '{ print $2 \" \" $1 }'"
    else:
        bounds = f"-v first='{given['first']}' -v last='{given['last']}' -v service={given['service']}"
        test = '$3 == "ERROR" && $4 == service && at >= first && at <= last'
        program = f'{{ at = $1 " " $2 }} {test} {{ count++ }} END {{ print count + 0 }}'
        work = f"zcat -f logs/app.log* | awk {bounds} '{program}'"
    return ["head -n 3 logs/app.log", f"{work} > {target}", f"cat {target}"]


def _access(rng: Rng, level: int) -> Draft:
    target = f"{pick(rng, WORDS)}.txt"
    clients = [f"10.{integer(rng, 0, 9)}.{integer(rng, 0, 99)}.{number + 10}" for number in range(6)]
    pages = [f"/{one}/{two}" for one, two in zip(sample(rng, WORDS, 7), sample(rng, WORDS, 7), strict=True)]
    months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
    requests = []
    for time in _times(rng, integer(rng, 50, 70 * level)):
        client = clients[min(int(rng.exponential(1.5)), 5)]
        size = integer(rng, 100, 9999)
        requests.append((client, time, pick(rng, pages), pick(rng, (200, 200, 200, 301, 404, 500)), size))
    counts = Counter(request[0] for request in requests)
    (best, most), *rest = counts.most_common(2)
    if rest and rest[0][1] == most:
        requests.append((best, requests[-1][1], pages[0], 200, 512))
        most += 1
    given: dict[str, Any] = {"target": target, "level": level}
    text = "".join(
        f"{client} - - [{time[8:10]}/{months[int(time[5:7]) - 1]}/{time[:4]}:{time[11:]} +0000] "
        f'"GET {page} HTTP/1.1" {status} {size}\n'
        for client, time, page, status, size in requests
    )
    tree: Tree = {"access.log": file(text)}
    if level == 1:
        given["status"] = pick(rng, (301, 404, 500))
        task = (
            f"Count the requests that were answered with the status {given['status']}, and write the number"
        )
        expected = str(sum(request[3] == given["status"] for request in requests))
    elif level == 2:
        task = "Find the address that sent the most requests, and write a line `address count`"
        expected = f"{best} {most}"
    else:
        given["count"] = integer(rng, 2, 4)
        totals: Counter[str] = Counter()
        for _, _, page, status, size in requests:
            totals[page] += size if status == 200 else 0
        ranked = sorted(((p, n) for p, n in totals.items() if n), key=lambda each: (-each[1], each[0]))
        expected = "\n".join(f"{page} {total}" for page, total in ranked[: given["count"]])
        task = (
            f"Find the {given['count']} paths that were sent the most bytes in total by answers with the "
            "status "
            "200, and write a line `path bytes` for each, the most bytes first,"
        )
    return Draft(
        instruction="The file access.log is the log of a web server in the common form: address, user, time, "
        f"request, status, bytes. {task} to the file {target}.",
        parameters=given,
        tree=tree,
        checks=[answer(target, expected), *unchanged(tree, ["access.log"])],
    )


def _solve_access(given: Mapping[str, Any]) -> list[str]:
    target = given["target"]
    if given["level"] == 1:
        work = f"awk '$9 == {given['status']} {{ n++ }} END {{ print n + 0 }}' access.log"
    elif given["level"] == 2:
        work = "cut -d' ' -f1 access.log | sort | uniq -c | sort -k1,1nr | head -n 1"
        work += " | awk '{ print $2 \" \" $1 }'"
    else:
        work = "awk '$9 == 200 { sum[$7] += $10 } END { for (p in sum) print p \" \" sum[p] }' access.log"
        work += f" | LC_ALL=C sort -k2,2nr -k1,1 | head -n {given['count']}"
    return ["head -n 2 access.log", f"{work} > {target}", f"cat {target}"]


def _durations(rng: Rng, level: int) -> Draft:
    target = f"{pick(rng, WORDS)}.txt"
    services = sample(rng, SERVICES, 4)
    count = integer(rng, 20, 40)
    ids = [f"{int(number):06x}" for number in rng.choice(1 << 24, size=count, replace=False)]
    spans = [int(span) for span in rng.choice(4000, size=count, replace=False) + 5]
    owners = [pick(rng, services) for _ in range(count)]
    given: dict[str, Any] = {"target": target, "level": level}
    if level < 3:
        lines = [
            f"{time} id={name} service={owner} ms={span}"
            for time, name, owner, span in zip(_times(rng, count), ids, owners, spans, strict=True)
        ]
        which = "of all requests"
        chosen = list(range(count))
        if level == 2:
            given["service"] = owners[0]
            which = f"of the requests of the service {owners[0]}"
            chosen = [at for at in chosen if owners[at] == owners[0]]
        slowest = max(chosen, key=lambda at: spans[at])
        what = "Each line of the file requests.log has a time, the id of a request, a service and how many "
        what += "milliseconds the request took."
        task = f"Find the slowest {which}, and write its id (without id=) to the file {target}."
        expected = ids[slowest]
    else:
        starts = [integer(rng, 0, 60_000) for _ in range(count)]
        done = [rng.random() < 0.85 for _ in range(count)]
        done[0] = True
        events = [(start, f"start {name}") for start, name in zip(starts, ids, strict=True)]
        events += [(starts[at] + spans[at], f"end {ids[at]}") for at in range(count) if done[at]]
        lines = [f"{time} {event}" for time, event in sorted(events)]
        given["limit"] = integer(rng, 500, 2500)
        long = [(spans[at], ids[at]) for at in range(count) if done[at] and spans[at] > given["limit"]]
        what = (
            "Each line of the file requests.log has a time in milliseconds, the word start or end and the id "
        )
        what += "of a request. Some requests have no end."
        task = (
            f"Write a line `id milliseconds` to the file {target} for every request that ended and took "
            "more than "
            f"{given['limit']} milliseconds, the slowest first."
        )
        expected = "\n".join(f"{name} {span}" for span, name in sorted(long, reverse=True))
    tree: Tree = {"requests.log": file("\n".join(lines) + "\n")}
    return Draft(
        instruction=f"{what} {task}",
        parameters=given,
        tree=tree,
        checks=[answer(target, expected), *unchanged(tree, ["requests.log"])],
    )


def _solve_durations(given: Mapping[str, Any]) -> list[str]:
    target = given["target"]
    if given["level"] < 3:
        lines = "cat requests.log"
        if given["level"] == 2:
            lines = f"grep ' service={given['service']} ' requests.log"
        work = f"{lines} | sed 's/.* id=\\([^ ]*\\) .* ms=/\\1 /' | sort -k2,2nr | head -n 1 | cut -d' ' -f1"
    else:
        match = '$2 == "start" { at[$3] = $1 } $2 == "end" && $3 in at && $1 - at[$3] > limit'
        work = f"awk -v limit={given['limit']} '{match} {{ print $3 \" \" $1 - at[$3] }}' requests.log"
        work += " | sort -k2,2nr"
    return ["head -n 3 requests.log", f"{work} > {target}", f"cat {target}"]


LOGS = (
    Kind("logs", "count errors", _errors, _solve_errors),
    Kind("logs", "read an access log", _access, _solve_access),
    Kind("logs", "measure requests", _durations, _solve_durations),
)
