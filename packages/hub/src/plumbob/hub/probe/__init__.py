"""What `hub check` runs in a process of its own: the environment, watched from within."""
