"""rollgym's environments for the trainers of other projects, one module each."""
