"""Tasks on git repositories: search the history, restore files, work with branches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.envs.terminal.families.base import (
    WORDS,
    Draft,
    Kind,
    Rng,
    answer,
    integer,
    pick,
    quote,
    sample,
    sentence,
    unchanged,
)
from rollgym.envs.terminal.git_repo import Repo
from rollgym.envs.terminal.types import Check

VERBS = ("Add", "Change", "Clean up", "Document", "Extend", "Improve", "Move", "Simplify", "Update")


def _git_check(top: str, command: str, expected: str) -> Check:
    """Check the output of git, without what the agent configured in the repository."""
    clean = "rm -rf .git/config .git/hooks .git/info .git/objects/info"
    settings = "export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null"
    return Check(kind="run", command=f"cd {top} && {clean} && {settings} && {command}", expected=expected)


def _subjects(rng: Rng, count: int) -> list[str]:
    """Different commit messages."""
    return [f"{pick(rng, VERBS)} {word} {pick(rng, WORDS)}" for word in sample(rng, WORDS, count)]


def _names(rng: Rng, count: int) -> list[str]:
    folders = ("", "", "docs/", "src/")
    return [f"{pick(rng, folders)}{word}.txt" for word in sample(rng, WORDS, count)]


def _text(rng: Rng) -> str:
    return "".join(f"{sentence(rng)}\n" for _ in range(integer(rng, 3, 6)))


def _grow(rng: Rng, repo: Repo, names: list[str], subjects: list[str]) -> list[str]:
    """Add commits that change one file each; all files exist from the first one on."""
    files = {name: _text(rng) for name in names}
    commits: list[str] = []
    for subject in subjects:
        commits.append(repo.commit(files, subject, commits[-1:]))
        files = {**files, (name := pick(rng, names)): files[name] + f"{sentence(rng)}\n"}
    repo.branches["main"] = commits[-1]
    return commits


def _history(rng: Rng, level: int) -> Draft:
    top, target, word = sample(rng, WORDS, 3)
    names, subjects = _names(rng, 3), _subjects(rng, integer(rng, 6, 8 + 4 * level))
    repo = Repo()
    given: dict[str, Any] = {"repo": top, "target": f"{target}.txt", "level": level}
    if level == 1:
        commits = _grow(rng, repo, names, subjects)
        place = integer(rng, 0, len(commits) - 1)
        given["subject"] = subjects[place]
        question = f'whose message is "{subjects[place]}"'
    else:
        given["file"] = names[0]
        place = integer(rng, 2, len(subjects) - 2)
        files = {name: _text(rng) for name in names}
        if level == 2:
            given["word"] = word.upper()
            question = f"that added the word {given['word']} to the file {names[0]}"
        else:
            given["limit"] = integer(rng, 100, 400)
            value = given["limit"] - integer(rng, 20, 60)
            question = (
                f"in which the number after `limit = ` in the file {names[0]} was above {given['limit']} for "
                "the first time (it only ever grows)"
            )
            files[names[0]] = f"limit = {value}\n" + files[names[0]]
        commits = []
        for number, subject in enumerate(subjects):
            if number and level == 3:
                value = given["limit"] + integer(rng, 1, 9) if number == place else value + integer(rng, 0, 1)
                files[names[0]] = f"limit = {value}\n" + files[names[0]].partition("\n")[2]
            elif number == place:
                files[names[0]] += f"{pick(rng, WORDS)} {given['word']} {pick(rng, WORDS)}\n"
            # Each commit changes something.
            changed = pick(rng, names[1:])
            files[changed] += f"{sentence(rng)}\n"
            commits.append(repo.commit(files, subject, commits[-1:]))
        repo.branches["main"] = commits[-1]
    tree = repo.tree(top)
    return Draft(
        instruction=f"The folder {top} is a git repository. Find the commit {question}, and write its full "
        f"hash to the file {given['target']} in the current folder.",
        parameters=given,
        tree=tree,
        checks=[answer(given["target"], commits[place]), *unchanged(tree, [f"{top}/{names[0]}"])],
    )


def _solve_history(given: Mapping[str, Any]) -> list[str]:
    git = f"git -C {given['repo']}"
    if given["level"] == 1:
        work = f"{git} log --format='%H %s' | grep -F {quote(' ' + given['subject'])} | cut -d' ' -f1"
    elif given["level"] == 2:
        work = f"{git} log --reverse --format=%H -S{given['word']} -- {given['file']} | head -n 1"
    else:
        shown = f"{git} show $c:{given['file']} | sed -n 's/^limit = //p'"
        work = f"for c in $({git} rev-list --reverse HEAD); do n=$({shown}); "
        work += f"if [ $n -gt {given['limit']} ]; then echo $c; break; fi; done"
    return [f"{git} log --oneline", f"({work}) > {given['target']}", f"cat {given['target']}"]


def _restore(rng: Rng, level: int) -> Draft:
    top = pick(rng, WORDS)
    names, subjects = _names(rng, 4), _subjects(rng, integer(rng, 6, 12))
    lost = names[0]
    repo = Repo()
    if level == 3:
        return _revert(rng, top, names, subjects)
    commits = _grow(rng, repo, names, subjects[:-2])
    content = repo.files(commits[-1])[lost]
    if level == 2:
        files = {name: text for name, text in repo.files(commits[-1]).items() if name != lost}
        for subject in subjects[-2:]:
            commits.append(repo.commit(files, subject, commits[-1:]))
            files = {**files, names[1]: files[names[1]] + f"{sentence(rng)}\n"}
        repo.branches["main"] = commits[-1]
    tree = repo.tree(top)
    tree.pop(f"{top}/{lost}", None)
    gone = "was deleted in the working folder by mistake. Restore it as it is in the last commit"
    if level == 2:
        gone = (
            "was deleted in one of the earlier commits. Restore the last version it had before that in the "
            "working folder"
        )
    return Draft(
        instruction=f"The folder {top} is a git repository. Its file {lost} {gone}. Make no new commit.",
        parameters={"repo": top, "file": lost, "level": level},
        tree=tree,
        checks=[
            answer(f"{top}/{lost}", content),
            _git_check(top, "git rev-parse main", commits[-1]),
            *unchanged(tree, [f"{top}/{name}" for name in names[1:]]),
        ],
    )


def _revert(rng: Rng, top: str, names: list[str], subjects: list[str]) -> Draft:
    repo = Repo()
    files = {name: _text(rng) for name in names}
    commits = [repo.commit(files, subjects[0])]
    place = integer(rng, 1, len(subjects) - 2)
    before = files[names[0]]
    for number, subject in enumerate(subjects[1:], 1):
        name = names[0] if number == place else pick(rng, names[1:])
        files[name] = _text(rng) if number == place else files[name] + f"{sentence(rng)}\n"
        commits.append(repo.commit(files, subject, commits[-1:]))
    repo.branches["main"] = commits[-1]
    wanted = {**files, names[0]: before}
    shown = " && ".join(f"git show main:{name}" for name in sorted(names))
    return Draft(
        instruction=f"The folder {top} is a git repository. Undo what the commit with the message "
        f'"{subjects[place]}" changed, by one new commit on top of the branch main. Keep all other '
        "changes and "
        "the history as it is.",
        parameters={"repo": top, "subject": subjects[place], "level": 3},
        tree=repo.tree(top),
        checks=[
            _git_check(top, "git rev-parse main~1", commits[-1]),
            _git_check(top, shown, "".join(wanted[name] for name in sorted(names))),
            answer(f"{top}/{names[0]}", before),
        ],
    )


def _solve_restore(given: Mapping[str, Any]) -> list[str]:
    git = f"git -C {given['repo']}"
    if given["level"] == 1:
        return [f"{git} status --short", f"{git} checkout -- {given['file']}"]
    if given["level"] == 2:
        return [
            f"c=$({git} rev-list -n 1 HEAD -- {given['file']})",
            f'{git} checkout "$c~1" -- {given["file"]}',
        ]
    found = f"{git} log --format='%H %s' | grep -F {quote(' ' + given['subject'])} | cut -d' ' -f1"
    return [f"c=$({found})", f'{git} revert --no-edit "$c"']


def _branches(rng: Rng, level: int) -> Draft:
    top, branch = sample(rng, WORDS, 2)
    branch = f"topic-{branch}"
    names, subjects = _names(rng, 3), _subjects(rng, integer(rng, 7, 12))
    repo = Repo()
    commits = _grow(rng, repo, names, subjects[:-4])
    given: dict[str, Any] = {"repo": top, "branch": branch, "level": level}
    if level == 1:
        place = integer(rng, 0, len(commits) - 2)
        tags = [f"v{number + 1}.{integer(rng, 0, 9)}" for number in range(len(commits))]
        repo.tags = dict(zip(tags, commits, strict=True))
        given["tag"] = tags[place]
        return Draft(
            instruction=f"The folder {top} is a git repository. Create a branch with the name {branch} that "
            f"points to the commit with the tag {tags[place]}. Stay on the branch main.",
            parameters=given,
            tree=repo.tree(top),
            checks=[
                _git_check(top, f"git rev-parse {branch}", commits[place]),
                _git_check(top, "git symbolic-ref --short HEAD", "main"),
                _git_check(top, "git rev-parse main", commits[-1]),
            ],
        )
    base = repo.files(commits[-1])
    ours, theirs = dict(base), dict(base)
    heads = [commits[-1], commits[-1]]
    for number in range(2):
        ours[names[1]] += f"{sentence(rng)}\n"
        theirs[names[2]] += f"{sentence(rng)}\n"
        if level == 3 and number:
            ours[names[0]], theirs[names[0]] = (f"{sentence(rng)}\n" + base[names[0]] for _ in range(2))
        heads[0] = repo.commit(ours, subjects[-4 + number], [heads[0]])
        heads[1] = repo.commit(theirs, subjects[-2 + number], [heads[1]])
    repo.branches = {"main": heads[0], branch: heads[1]}
    merged = {**base, names[1]: ours[names[1]], names[2]: theirs[names[2]], names[0]: theirs[names[0]]}
    if level == 3:
        given["file"] = names[0]
    conflict = (
        f" Both branches changed the file {names[0]}: take it as it is in {branch}. Commit the result."
        if level == 3
        else ""
    )
    shown = " && ".join(f"git show main:{name}" for name in sorted(names))
    return Draft(
        instruction=f"The folder {top} is a git repository. Merge the branch {branch} into the branch "
        "main, so "
        f"that main has the changes of both.{conflict}",
        parameters=given,
        tree=repo.tree(top),
        checks=[
            _git_check(top, f"git merge-base --is-ancestor {heads[0]} main && echo yes", "yes"),
            _git_check(top, f"git merge-base --is-ancestor {heads[1]} main && echo yes", "yes"),
            _git_check(top, shown, "".join(merged[name] for name in sorted(names))),
            _git_check(top, f"git rev-parse {branch}", heads[1]),
        ],
    )


def _solve_branches(given: Mapping[str, Any]) -> list[str]:
    git, branch = f"git -C {given['repo']}", given["branch"]
    if given["level"] == 1:
        return [f"{git} branch {branch} {given['tag']}"]
    commands = [f"{git} log --oneline --graph --all", f"{git} merge --no-edit {branch}"]
    if given["level"] == 3:
        path = given["file"]
        commands += [f"{git} checkout {branch} -- {path} && {git} add {path}", f"{git} commit --no-edit"]
    return commands


GIT = (
    Kind("git", "search history", _history, _solve_history),
    Kind("git", "restore content", _restore, _solve_restore),
    Kind("git", "work with branches", _branches, _solve_branches),
)
