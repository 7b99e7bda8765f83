"""Supervised fine-tuning: conversations and recorded episodes as training data.

config.py    SFTConfig: the settings
records.py   files -> conversations and episodes, with the reason for each line that cannot be read
dataset.py   selection, tokens, over-long conversations, validation split, and a report that counts all of it
prepare.py   demonstrations, files and the report ``data.json`` of a run
loop.py      the order of a run: validate, optimizer steps, evaluate, save
run.py       a run on data in any objective, which `rollgym.trainer.dpo` shares
main.py      entry points of `rollgym sft`, `rollgym.sft` and `rollgym.asft`
"""
