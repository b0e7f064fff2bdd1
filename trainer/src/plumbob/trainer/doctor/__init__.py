"""What the doctor examines of this trainer: an environment's tasks, settings, and a run that is set up but not started."""
