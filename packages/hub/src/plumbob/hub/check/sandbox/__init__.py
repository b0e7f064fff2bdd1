"""The child process of `hub check`, which imports, loads and plays the environment and reports what it observes."""
