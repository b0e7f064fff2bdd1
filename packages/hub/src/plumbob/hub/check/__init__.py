"""`hub check`: test whether an environment may be published."""
