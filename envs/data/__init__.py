"""Tasks from data files: prompts and answers in rows."""
