"""The command lines `hub` and `vf-install`."""
