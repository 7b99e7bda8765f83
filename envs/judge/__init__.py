"""Writing tasks whose reward is a judge's score by a rubric."""
