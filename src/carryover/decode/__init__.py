"""Decoding: rounds of draft, verify and commit, for one request at a time."""
