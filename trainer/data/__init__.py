"""Training data: from episodes to the token sequences and arrays of an update.

sequences.py       Episode -> TokenEpisode: token sequences and positions of the policy's tokens
batch.py           Batch: episodes with flat arrays over action tokens; mini- and micro-batches
packing.py         sequences end to end in one forward pass, shared prefixes only once
rollout_batch.py   groups of episodes -> shaped rewards -> advantages -> Batch
"""
