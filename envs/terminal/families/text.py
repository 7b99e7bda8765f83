"""Tasks on text: tables, words, lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rollgym.envs.terminal.families.base import (
    PEOPLE,
    WORDS,
    Draft,
    Kind,
    Rng,
    answer,
    integer,
    paths,
    pick,
    sample,
    unchanged,
)
from rollgym.envs.terminal.types import Tree, file

COLUMNS = ("id", "customer", "city", "item", "quantity", "price")


def _table(rng: Rng, level: int) -> Draft:
    cities, items = sample(rng, WORDS, integer(rng, 4, 7)), sample(rng, WORDS, 8)
    people = sample(rng, PEOPLE, integer(rng, 5, 9))
    source, target = (
        f"{name}.{end}" for name, end in zip(sample(rng, WORDS, 2), ("csv", "txt"), strict=True)
    )
    rows = [
        (
            1000 + number,
            pick(rng, people),
            pick(rng, cities),
            pick(rng, items),
            integer(rng, 1, 20),
            integer(rng, 2, 90),
        )
        for number in range(integer(rng, 20, 40 * level))
    ]
    tree: Tree = {source: file("\n".join(",".join(map(str, row)) for row in (COLUMNS, *rows)) + "\n")}
    given: dict[str, Any] = {"source": source, "target": target, "level": level}
    if level == 1:
        column = integer(rng, 1, 3)
        given["column"] = column + 1
        task = f"Write the different values of the column {COLUMNS[column]}, sorted, one per line,"
        expected = "\n".join(sorted({str(row[column]) for row in rows}))
    elif level == 2:
        given["city"] = pick(rng, rows)[2]
        task = f"Add up the column quantity of all rows whose city is {given['city']}. Write the sum"
        expected = str(sum(row[4] for row in rows if row[2] == given["city"]))
    else:
        task = (
            "An order costs its quantity times its price. Write what all orders of each customer cost "
            "together, one line `customer,total` per customer, the highest total first and customers with "
            "the same total in alphabetical order,"
        )
        totals: Counter[str] = Counter()
        for row in rows:
            totals[row[1]] += row[4] * row[5]
        ranked = sorted(totals.items(), key=lambda each: (-each[1], each[0]))
        expected = "\n".join(f"{name},{total}" for name, total in ranked)
    return Draft(
        instruction=f"The file {source} is a table of orders with the columns {', '.join(COLUMNS)}; its "
        "first "
        f"line holds their names. {task} to the file {target}.",
        parameters=given,
        tree=tree,
        checks=[answer(target, expected), *unchanged(tree, [source])],
    )


def _solve_table(given: Mapping[str, Any]) -> list[str]:
    rows = f"tail -n +2 {given['source']}"
    if given["level"] == 1:
        work = f"cut -d, -f{given['column']} | LC_ALL=C sort -u"
    elif given["level"] == 2:
        work = f"awk -F, '$3 == \"{given['city']}\" {{ sum += $5 }} END {{ print sum + 0 }}'"
    else:
        work = "awk -F, '{ total[$2] += $5 * $6 } END { for (name in total) print name \",\" total[name] }'"
        work += " | LC_ALL=C sort -t, -k2,2nr -k1,1"
    return [f"head -n 3 {given['source']}", f"{rows} | {work} > {given['target']}", f"cat {given['target']}"]


def _words(rng: Rng, level: int) -> Draft:
    source, target = sample(rng, WORDS, 2)
    target = f"{target}.txt"
    vocabulary = sample(rng, WORDS, 12)
    names = [f"{source}.txt"]
    if level == 3:
        names = [f"{source}/{name}" for name in paths(rng, integer(rng, 3, 6), 2, ("txt", "md"))]
        names[0] = names[0].rpartition(".")[0] + ".txt"
    texts = {
        name: [
            [vocabulary[min(int(rng.exponential(3.0)), 11)] for _ in range(integer(rng, 3, 9))]
            for _ in range(integer(rng, 10, 25))
        ]
        for name in names
    }
    if level == 3:
        for lines in texts.values():
            for words in lines:
                words[0] = words[0].capitalize()
    tree: Tree = {
        name: file("\n".join(" ".join(words) for words in lines) + "\n") for name, lines in texts.items()
    }
    given: dict[str, Any] = {"source": source, "target": target, "level": level}
    if level == 1:
        given |= {"source": names[0], "word": pick(rng, texts[names[0]])[0]}
        count = sum(given["word"] in words for words in texts[names[0]])
        return Draft(
            instruction=f"Count the lines of the file {names[0]} that contain the word {given['word']}, and "
            f"write the number to the file {target}.",
            parameters=given,
            tree=tree,
            checks=[answer(target, count), *unchanged(tree, names)],
        )
    given["count"] = integer(rng, 3, 6)
    left_out: set[str] = set()
    where = f"of the file {names[0]}"
    if level == 2:
        given["source"] = names[0]
    else:
        left_out = set(vocabulary[:2])
        tree["stop.txt"] = file("".join(f"{word}\n" for word in sorted(left_out)))
        where = (
            f"of all files below the folder {source} whose name ends in .txt, where upper and lower case are "
            "the same (write lower case), and words listed in the file stop.txt do not count"
        )
    counts = Counter(
        word.lower()
        for name, lines in texts.items()
        if name.endswith(".txt")
        for words in lines
        for word in words
    )
    ranked = sorted(
        ((word, count) for word, count in counts.items() if word not in left_out),
        key=lambda each: (-each[1], each[0]),
    )
    expected = "\n".join(f"{word} {count}" for word, count in ranked[: given["count"]])
    return Draft(
        instruction=f"Find the {given['count']} most frequent words {where}. Write them to the file "
        f"{target}, "
        "one line `word count` each, the most frequent first and words with the same count in alphabetical "
        "order.",
        parameters=given,
        tree=tree,
        checks=[answer(target, expected), *unchanged(tree, sorted(tree))],
    )


def _solve_words(given: Mapping[str, Any]) -> list[str]:
    source, target = given["source"], given["target"]
    if given["level"] == 1:
        return [f"grep -cw {given['word']} {source} > {target}", f"cat {target}"]
    words = f"cat {source}"
    skip = ""
    if given["level"] == 3:
        words = f"find {source} -type f -name '*.txt' -exec cat {{}} + | tr 'A-Z' 'a-z'"
        skip = " | grep -vxF -f stop.txt"
    count = "LC_ALL=C sort | uniq -c | LC_ALL=C sort -k1,1nr -k2,2"
    show = f"head -n {given['count']} | awk '{{ print $2 \" \" $1 }}'"
    return [f"{words} | tr -s ' ' '\\n' | grep .{skip} | {count} | {show} > {target}", f"cat {target}"]


def _lists(rng: Rng, level: int) -> Draft:
    first, second, target = (f"{name}.txt" for name in sample(rng, WORDS, 3))
    if level == 3:
        people = sample(rng, [f"{one}-{two}" for one in PEOPLE for two in WORDS[:40]], integer(rng, 12, 24))
        numbers = [f"{int(number):04d}" for number in rng.choice(9000, size=len(people), replace=False)]
        names = dict(zip(numbers, people, strict=True))
        towns = {number: pick(rng, WORDS) for number in numbers if rng.random() < 0.7}
        towns |= {f"{9000 + number}": pick(rng, WORDS) for number in range(integer(rng, 1, 4))}
        towns.setdefault(numbers[0], pick(rng, WORDS))
        tables = [
            "".join(f"{number},{each[number]}\n" for number in sample(rng, sorted(each), len(each)))
            for each in (names, towns)
        ]
        expected = sorted(f"{names[number]},{towns[number]}" for number in names if number in towns)
        task = (
            f"Each line of the file {first} is `number,name`, and each line of {second} is `number,city`. "
            "For every number that is in both files, write a line `name,city`, sorted by name,"
        )
    else:
        words = sample(rng, WORDS, integer(rng, 20, 40))
        cut = len(words) // 3
        lists = [sample(rng, words[: 2 * cut], 2 * cut), sample(rng, words[cut:], len(words) - cut)]
        lists = [each + [pick(rng, each) for _ in range(3)] for each in lists]
        tables = ["".join(f"{word}\n" for word in each) for each in lists]
        union = level == 1
        expected = sorted(set(lists[0]) | set(lists[1]) if union else set(lists[0]) - set(lists[1]))
        which = f"that are in {first} or in {second}" if union else f"that are in {first} but not in {second}"
        task = f"Write the lines {which}, each once, sorted,"
    tree: Tree = {first: file(tables[0]), second: file(tables[1])}
    return Draft(
        instruction=f"{task} to the file {target}.",
        parameters={"first": first, "second": second, "target": target, "level": level},
        tree=tree,
        checks=[answer(target, "\n".join(expected)), *unchanged(tree, [first, second])],
    )


def _solve_lists(given: Mapping[str, Any]) -> list[str]:
    first, second = given["first"], given["second"]
    if given["level"] == 1:
        work = f"sort -u {first} {second}"
    elif given["level"] == 2:
        work = f"comm -23 <(sort -u {first}) <(sort -u {second})"
    else:
        work = f"join -t, <(sort {first}) <(sort {second}) | cut -d, -f2,3 | sort"
    return ["export LC_ALL=C", f"{work} > {given['target']}", f"cat {given['target']}"]


TEXT = (
    Kind("text", "query a table", _table, _solve_table),
    Kind("text", "count words", _words, _solve_words),
    Kind("text", "combine lists", _lists, _solve_lists),
)
