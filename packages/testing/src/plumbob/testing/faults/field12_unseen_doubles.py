"""The doubles of field12_unseen.py: whoever writes rules does not read the unseen half before it has been run."""
