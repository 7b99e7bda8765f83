"""Direct preference optimization: pairs of a chosen and a rejected reply or episode as training data.

config.py        DPOConfig: the settings
pairs.py         records and episodes -> pairs of token sequences
loop.py          batches of pairs, the reference's log-probs, validation
main.py          entry points of `rollgym dpo`, `rollgym.dpo` and `rollgym.adpo`

The run itself is that of `rollgym.trainer.sft.run`, and the loss is in `rollgym.trainer.losses.preference`.
"""
