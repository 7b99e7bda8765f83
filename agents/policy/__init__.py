"""The ``lm`` agent: a policy whose token ids are recorded, played through an `Engine`."""
