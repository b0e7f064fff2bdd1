"""`hub new` and `hub publish`: create an environment, build it and upload it."""
