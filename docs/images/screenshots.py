"""Take the screenshots of the docs from real runs: ``make screenshots``.

A small policy is trained on FrozenLake for a few steps (some minutes), and agents play Sokoban and the shop.
``--run FOLDER`` shows an existing training run instead; ``--smollm FOLDER`` takes only the pictures of a run
of SmolLM2 on the shop.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from rollgym.browser.find import find_chromium
from rollgym.core.registry import make
from rollgym.evaluation.runner import Request, evaluate
from rollgym.view import export

IMAGES = Path(__file__).parent
CONFIG = "frozen-lake-gigpo"
SETTINGS = ["stop.steps=20", "evaluation.every=5", "evaluation.episodes=150", "tracking.tokens_every=1"]

Shot = tuple[str, str, str, str, int, str]
SHOTS: tuple[Shot, ...] = (
    ("view-report", "train", "#overview", "light", 1_000, ".plots"),
    ("view-report-dark", "train", "#overview", "dark", 1_000, ".plots"),
    ("view-tokens", "train", "", "light", 620, ".token"),
    ("view-timeline", "train", "#timeline", "light", 1_300, "canvas.lanes"),
    ("view-episode", "sokoban", "#episodes/0", "light", 760, ".turn .board"),
    ("view-group", "sokoban", "#episodes/0/group", "dark", 620, ".sibling .board"),
    ("view-shop", "shop", "#episodes/0", "light", 900, ".shop"),
)
"""Name, page, fragment, color scheme, height, and the element to wait for."""
SMOLLM_SHOTS: tuple[Shot, ...] = (
    ("smollm-webshop", "train", "#overview", "light", 1_000, ".plots"),
    ("smollm-webshop-episodes", "train", "#episodes", "light", 620, ".rows .row"),
    ("smollm-webshop-tokens", "train", "", "light", 760, ".token"),
)


def main() -> None:
    """Make the runs, export their pages and take the screenshots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--run", type=Path, help="an existing training run")
    parser.add_argument("--smollm", type=Path, help="a run of smollm-webshop: take its pictures only")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder of the screenshots")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.smollm is not None:
            page = export(args.smollm, Path(folder) / "train.html", episodes=400).path
            shoot({"train": page}, args.out, SMOLLM_SHOTS)
            return
        shoot(make_pages(Path(folder), args.run), args.out)
    shoot_shop(args.out / "webshop.png")


def make_pages(folder: Path, run: Path | None) -> dict[str, Path]:
    """Return the exported pages by name."""
    if run is None:
        from rollgym.trainer.main import run_training

        run = folder / CONFIG
        run_training(CONFIG, SETTINGS, run, plain=True)
    pages = {"train": export(run, folder / "train.html", episodes=400).path}
    for name, env, agent in (
        ("sokoban", "rollgym/Sokoban-v0", "random"),
        ("shop", "rollgym/WebShop-v0", "expert"),
    ):
        evaluate(Request(env_id=env, agent=agent, episodes=40, per_task=4), folder / name)
        pages[name] = export(folder / name, folder / f"{name}.html").path
    return pages


def shoot(pages: dict[str, Path], out: Path, shots: tuple[Shot, ...] = SHOTS) -> None:
    """Take one screenshot per view."""
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        for name, page, fragment, scheme, height, wait in shots:
            tab = browser.new_page(viewport={"width": 1_240, "height": height}, color_scheme=scheme)
            tab.goto(pages[page].as_uri() + (fragment or "#episodes"))
            if wait == ".token":
                _open_longest(tab)
            tab.wait_for_selector(wait)
            tab.wait_for_timeout(300)
            tab.screenshot(path=out / f"{name}.png")
            tab.close()
            print(out / f"{name}.png")
        browser.close()


def shoot_shop(file: Path) -> None:
    """Take a screenshot of a product's page in a browser, with an option chosen."""
    env: Any = make("rollgym/WebShopBrowser-v0")
    _, info = env.reset(seed=1, options={"task": 3, "split": "test"})
    words = re.sub(r"[^a-z ]", "", info["instruction"].lower().partition(".")[0])
    observation = env.step(f"type[e1][{words}]")[0]
    link = re.search(r"(e[0-9]+). link ", observation)
    observation = env.step(f"click[{link and link[1]}]")[0]
    for option, name in re.findall(r"(e[0-9]+). radio \"([^\"]+)\"", observation):
        if name.split()[-1] in words:
            env.step(f"click[{option}]")
    file.write_bytes(env.unwrapped.screenshot())
    print(file)
    env.close()


def _open_longest(tab: Any) -> None:
    """Show the tokens of the longest success, colored by probability."""
    tab.select_option("[aria-label=success]", "true")
    tab.click(".head [data-key=tokens]")
    tab.click(".rows .row >> nth=0")
    tab.click(".tabs >> text=Tokens")
    tab.wait_for_selector(".token.own")
    tab.hover(".token.own >> nth=4")


if __name__ == "__main__":
    main()
