"""Listing, finding and loading the environments that are installed in this Python."""
