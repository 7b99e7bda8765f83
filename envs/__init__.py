"""The environments that come with rollgym, one package each.

Importing this registers nothing and loads none of them; ``import rollgym`` calls `register_all`.
"""

from rollgym.core.registry import register

_HERE = "rollgym.envs"


def register_all() -> None:
    """Register every environment of this package, each as strings only."""
    for preset, size in (("", "6x6, 1 box"), ("8x8", "8x8, 2 boxes"), ("10x10", "10x10, 4 boxes")):
        register(
            f"rollgym/Sokoban{preset}-v0",
            f"{_HERE}.sokoban.env:SokobanEnv",
            summary=f"Push every box onto a target ({size})",
            expert=f"{_HERE}.sokoban.expert:SokobanExpert",
            kwargs={"preset": preset or "6x6"},
        )
    register(
        "rollgym/FrozenLake-v0",
        f"{_HERE}.frozen_lake.env:FrozenLakeEnv",
        summary="Walk over a frozen lake to the goal without falling into a hole",
        max_turns=20,
        expert=f"{_HERE}.frozen_lake.expert:FrozenLakeExpert",
    )
    register(
        "rollgym/Bandit-v0",
        f"{_HERE}.bandit.env:BanditEnv",
        summary="Find the best of several slot machines by pulling them",
        expert=f"{_HERE}.bandit.expert:BanditExpert",
        expert_is="baseline",
    )
    register(
        "rollgym/Countdown-v0",
        f"{_HERE}.countdown.env:CountdownEnv",
        summary="Reach a target number from given numbers with + - * /",
        expert=f"{_HERE}.countdown.expert:CountdownExpert",
    )
    register(
        "rollgym/GuessTheNumber-v0",
        f"{_HERE}.guess_the_number.env:GuessTheNumberEnv",
        summary="Find a hidden number from higher/lower answers",
        expert=f"{_HERE}.guess_the_number.expert:GuessTheNumberExpert",
    )
    register(
        "rollgym/Wordle-v0",
        f"{_HERE}.wordle.env:WordleEnv",
        summary="Find a hidden five-letter word from marked guesses",
        expert=f"{_HERE}.wordle.expert:WordleExpert",
    )
    register(
        "rollgym/Mastermind-v0",
        f"{_HERE}.mastermind.env:MastermindEnv",
        summary="Break a code of digits from black and white pegs",
        expert=f"{_HERE}.mastermind.expert:MastermindExpert",
    )
    register(
        "rollgym/Minesweeper-v0",
        f"{_HERE}.minesweeper.env:MinesweeperEnv",
        summary="Uncover every cell that hides no mine",
        expert=f"{_HERE}.minesweeper.expert:MinesweeperExpert",
    )
    register(
        "rollgym/TowerOfHanoi-v0",
        f"{_HERE}.tower_of_hanoi.env:TowerOfHanoiEnv",
        summary="Move a tower of disks to another peg, never a larger disk on a smaller",
        expert=f"{_HERE}.tower_of_hanoi.expert:TowerOfHanoiExpert",
    )
    register(
        "rollgym/Sudoku-v0",
        f"{_HERE}.sudoku.env:SudokuEnv",
        summary="Fill a Sudoku grid with exactly one solution",
        expert=f"{_HERE}.sudoku.expert:SudokuExpert",
    )
    register(
        "rollgym/TwentyFortyEight-v0",
        f"{_HERE}.twenty_forty_eight.env:TwentyFortyEightEnv",
        summary="Slide and merge tiles until one reaches the goal",
        expert=f"{_HERE}.twenty_forty_eight.expert:TwentyFortyEightExpert",
        expert_is="baseline",
    )
    register(
        "rollgym/Nim-v0",
        f"{_HERE}.nim.env:NimEnv",
        summary="Take objects from heaps in turn with another player; the last object wins",
        expert=f"{_HERE}.nim.expert:NimExpert",
    )
    register(
        "rollgym/ServiceDesk-v0",
        f"{_HERE}.service_desk.env:ServiceDeskEnv",
        summary="Serve a customer of a shop with tools, by a written policy",
        expert=f"{_HERE}.service_desk.expert:ServiceDeskExpert",
    )
    register(
        "rollgym/WebShop-v0",
        f"{_HERE}.webshop.env:WebShopEnv",
        summary="Find a product in a web shop by an instruction, choose its options and buy it",
        expert=f"{_HERE}.webshop.rule_agent:RuleAgent",
        expert_is="baseline",
        needs=("webshop",),
    )
    register(
        "rollgym/WebShopBrowser-v0",
        f"{_HERE}.webshop.browser:WebShopBrowserEnv",
        summary="The same shop in a web browser, seen through the accessibility tree",
        expert=f"{_HERE}.webshop.browser.agents:BrowserRule",
        expert_is="baseline",
        needs=("webshop", "browser"),
    )
    register(
        "rollgym/Code-v0",
        f"{_HERE}.code.env:CodeEnv",
        summary="Write a Python function, run code in a sandbox, be judged by hidden tests",
        expert=f"{_HERE}.code.expert:CodeExpert",
    )
    register(
        "rollgym/PythonTool-v0",
        f"{_HERE}.code.tool_env:PythonToolEnv",
        summary="Answer a question with a number, with sandboxed Python as a tool",
        expert=f"{_HERE}.code.expert:PythonToolExpert",
    )
    register(
        "rollgym/CodeSnippets-v0",
        f"{_HERE}.code.snippets:SnippetsEnv",
        summary="Put given lines of code together to a program that passes hidden tests",
        expert=f"{_HERE}.code.expert:SnippetsExpert",
    )
    register(
        "rollgym/Terminal-v0",
        f"{_HERE}.terminal.env:TerminalEnv",
        summary="Do tasks on files in a sandboxed shell, be judged by hidden checks",
        expert=f"{_HERE}.terminal.expert:TerminalExpert",
    )
    register(
        "rollgym/Data-v0",
        f"{_HERE}.data.env:DataEnv",
        summary="Answer questions from rows of JSONL, Parquet or Arrow files, scored by a judge",
        expert=f"{_HERE}.data.expert:DataExpert",
    )
    register(
        "rollgym/Math-v0",
        f"{_HERE}.math.env:MathEnv",
        summary="Solve a mathematics problem, from sums to equations and word problems",
        expert=f"{_HERE}.math.expert:MathExpert",
    )
    register(
        "rollgym/Questions-v0",
        f"{_HERE}.questions.env:QuestionsEnv",
        summary="Answer a question by a choice or in a few words",
        expert=f"{_HERE}.questions.expert:QuestionsExpert",
    )
    register(
        "rollgym/Instructions-v0",
        f"{_HERE}.instructions.env:InstructionsEnv",
        summary="Write a text under constraints that a program checks",
        expert=f"{_HERE}.instructions.expert:InstructionsExpert",
    )
    register(
        "rollgym/Judge-v0",
        f"{_HERE}.judge.env:JudgeEnv",
        summary="Write a text that a judge scores by a rubric",
        expert=f"{_HERE}.judge.expert:JudgeExpert",
    )
