"""Losses: pure functions of the action tokens of one micro-batch.

settings.py      LossConfig: which loss, its clip bounds, KL term and aggregation
policy.py        Tokens, policy_loss, register_loss and the built-in policy losses
value.py         value_loss of the critic
preference.py    preference_loss: DPO on pairs; preference_settings.py has its settings
kl.py            KL estimators
adaptive.py      coefficients that approach a target KL or entropy
aggregation.py   the weight of each token in the loss
metrics.py       metrics that add up over micro-batches and ranks
"""
