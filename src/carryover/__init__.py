"""Carryover Drafting: train, measure and serve block drafters that recycle rejected states."""

__version__ = "0.1.0"
